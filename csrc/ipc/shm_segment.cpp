#include "ipc/shm_segment.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ipc/atomics.hpp"
#include "ipc/errors.hpp"
#include "ipc/numa.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace neo::ipc {
namespace {

constexpr std::uint64_t kHugePage = 2ULL << 20;
// One populate call; small enough to spread over threads, large enough to cost no time itself.
constexpr std::uint64_t kPopulateChunk = 32 * kHugePage;

const char* kind_name(wire::SegmentKind kind) {
  static const char* const names[] = {"?",         "control", "steps",    "results",
                                      "sequences", "work",    "exchange", "cpu_cache"};
  const auto index = static_cast<std::uint32_t>(kind);
  return index < 8 ? names[index] : "?";
}

[[noreturn]] void throw_errno(const std::string& what, int error) {
  throw SharedMemoryError(what + ": " + std::strerror(error));
}

[[noreturn]] void throw_no_room(std::uint64_t needs, std::uint64_t has) {
  throw SharedMemoryError("needs " + std::to_string(needs) + " bytes of shared memory, has " +
                          std::to_string(has) +
                          "; enlarge /dev/shm (Docker: shm_size) or set --shm-dir");
}

std::uint64_t free_bytes(int fd) {
  struct statvfs info{};
  if (fstatvfs(fd, &info) != 0) throw_errno("fstatvfs", errno);
  // A tmpfs without a limit reports no blocks at all.
  if (info.f_blocks == 0) return UINT64_MAX;
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

std::byte* map_file(int fd, std::uint64_t size, bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_errno("mmap of " + std::to_string(size) + " bytes", errno);
  // Advice only: a kernel or mount without huge pages refuses it, and 4 KiB pages work too.
  if (size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

int populate_range(std::byte* begin, std::uint64_t bytes) {
  while (madvise(begin, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
  return 0;
}

// Populates chunks first, first + step, ... of a range; returns an errno.
int populate_chunks(std::byte* begin, std::uint64_t bytes, std::uint64_t first,
                    std::uint64_t step) {
  for (std::uint64_t at = first * kPopulateChunk; at < bytes; at += step * kPopulateChunk) {
    const int failed = populate_range(begin + at, std::min(kPopulateChunk, bytes - at));
    if (failed != 0) return failed;
  }
  return 0;
}

}  // namespace

// A page gets its memory on the node of the thread that first touches it. Where there are several
// nodes the threads take turns over them, so chunks are spread evenly: any worker may attend to any
// page, and every node's memory channels serve.
void Segment::populate(std::uint64_t offset, std::uint64_t bytes, unsigned threads) {
  const std::uint64_t page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = offset / page * page;
  const std::uint64_t end = std::min(size_, offset + bytes);
  if (begin >= end) return;
  const std::uint64_t chunks = (end - begin + kPopulateChunk - 1) / kPopulateChunk;
  auto nodes = usable_nodes();
  if (threads <= 1 || nodes.size() <= 1) nodes.clear();  // one thread: where the caller is
  const auto per_node = std::max<std::uint64_t>(nodes.size(), 1);
  const std::uint64_t wanted = (std::max(threads, 1u) + per_node - 1) / per_node * per_node;
  const std::uint64_t n = std::min(wanted, chunks);
  std::atomic<int> error{0};
  const auto work = [&](std::uint64_t i) {
    // Advice only: on the wrong node the memory is slower, not wrong.
    if (!nodes.empty()) sched_setaffinity(0, sizeof(cpu_set_t), &nodes[i % nodes.size()]);
    const int failed = populate_chunks(data_ + begin, end - begin, i, n);
    if (failed != 0) error.store(failed);
  };
  std::vector<std::thread> helpers;
  for (std::uint64_t i = nodes.empty() ? 1 : 0; i < n; ++i) helpers.emplace_back(work, i);
  if (nodes.empty()) work(0);
  for (auto& helper : helpers) helper.join();
  if (error.load() != 0) {
    throw_errno("needs " + std::to_string(end - begin) +
                    " bytes of shared memory, which the kernel did not give (MADV_POPULATE_WRITE)",
                error.load());
  }
}

std::shared_ptr<Segment> Segment::create(int fd, const SegmentSpec& spec, unsigned threads,
                                         const std::function<void(std::byte*)>& format) {
  const std::uint64_t has = free_bytes(fd);
  if (has < spec.populated) throw_no_room(spec.populated, has);
  if (ftruncate(fd, static_cast<off_t>(spec.size)) != 0) {
    throw_errno(std::string("sizing the ") + kind_name(spec.kind) + " segment to " +
                    std::to_string(spec.size) + " bytes",
                errno);
  }
  std::shared_ptr<Segment> segment(new Segment(map_file(fd, spec.size, true), spec.size, true));
  segment->populate(0, spec.populated, threads);
  format(segment->data_);
  auto* header = reinterpret_cast<wire::SegmentHeader*>(segment->data_);
  header->magic = wire::kMagic;
  header->layout_hash = wire::layout_hash();
  header->size = spec.size;
  header->kind = static_cast<std::uint32_t>(spec.kind);
  header->rank = spec.rank;
  header->owner_pid = static_cast<std::int32_t>(getpid());
  store_release(&header->version, wire::kVersion);  // pairs with the acquire load in attach
  return segment;
}

namespace {

void refuse(const char* field, std::uint64_t found, std::uint64_t wanted) {
  std::ostringstream message;
  message << std::hex << "segment " << field << " is 0x" << found << ", this build has 0x"
          << wanted;
  throw LayoutMismatchError(message.str());
}

void check_header(const wire::SegmentHeader& header, wire::SegmentKind kind, std::uint64_t size) {
  const std::uint32_t version = load_acquire(&header.version);
  if (version == 0) throw LayoutMismatchError("segment is not finished: its version is 0");
  if (header.magic != wire::kMagic) refuse("magic", header.magic, wire::kMagic);
  if (version != wire::kVersion) refuse("version", version, wire::kVersion);
  if (header.layout_hash != wire::layout_hash()) {
    refuse("layout hash", header.layout_hash, wire::layout_hash());
  }
  if (header.kind != static_cast<std::uint32_t>(kind)) {
    throw LayoutMismatchError(std::string("segment kind is ") +
                              kind_name(static_cast<wire::SegmentKind>(header.kind)) + ", wanted " +
                              kind_name(kind));
  }
  if (header.size != size) {
    throw LayoutMismatchError("segment size is " + std::to_string(size) + ", its header says " +
                              std::to_string(header.size));
  }
}

}  // namespace

std::shared_ptr<Segment> Segment::attach(int fd, wire::SegmentKind kind, bool writable) {
  struct stat info{};
  if (fstat(fd, &info) != 0) throw_errno("fstat", errno);
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size < sizeof(wire::SegmentHeader)) {
    throw LayoutMismatchError("segment is not finished: it has " + std::to_string(size) +
                              " bytes, a header has " +
                              std::to_string(sizeof(wire::SegmentHeader)));
  }
  std::shared_ptr<Segment> segment(new Segment(map_file(fd, size, writable), size, writable));
  check_header(segment->header(), kind, size);
  return segment;
}

Segment::~Segment() { munmap(data_, size_); }

}  // namespace neo::ipc
