// One mapped shared-memory segment: size, map, populate, format; or attach and check.
//
//   0                64                                              size
//   ├─ SegmentHeader ┼─ what layout/segment_layout.hpp says ... ─────┤
//        └ version, release-stored last by the creator, acquire-loaded by who attaches
//
// Names and lifetime are Python's (neo_native/segments.py); here a segment is a file descriptor,
// which stays the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "protos/wire.hpp"

namespace neo::ipc {

struct SegmentSpec {
  wire::SegmentKind kind;
  std::uint32_t rank;
  std::uint64_t size;       // bytes of the whole segment
  std::uint64_t populated;  // leading bytes that get memory now; the rest gets it by populate()
};

class Segment {
 public:
  // Sizes, maps, populates, lets `format` fill the contents and publishes the header.
  // Throws SharedMemoryError when the file system has too little room.
  static std::shared_ptr<Segment> create(int fd, const SegmentSpec& spec, unsigned threads,
                                         const std::function<void(std::byte*)>& format);

  // Throws LayoutMismatchError for a segment of another kind, version or layout, or unfinished.
  static std::shared_ptr<Segment> attach(int fd, wire::SegmentKind kind, bool writable);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Gives [offset, offset + bytes) its memory now, so that a full file system is an error here and
  // not a SIGBUS later.
  void populate(std::uint64_t offset, std::uint64_t bytes, unsigned threads);

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  bool writable() const { return writable_; }
  const wire::SegmentHeader& header() const {
    return *reinterpret_cast<const wire::SegmentHeader*>(data_);
  }

 private:
  Segment(std::byte* data, std::uint64_t size, bool writable)
      : data_(data), size_(size), writable_(writable) {}

  std::byte* data_;
  std::uint64_t size_;
  bool writable_;
};

}  // namespace neo::ipc
