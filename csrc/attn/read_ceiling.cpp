#include "attn/read_ceiling.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>

namespace neo::attn {
namespace {

constexpr std::size_t kLine = 64;
using Words = std::uint64_t __attribute__((vector_size(kLine)));

// Sums `size` bytes as kStreams equal runs side by side, prefetching `kAhead` bytes ahead in each.
template <std::size_t kStreams, std::size_t kAhead>
std::uint64_t scan(const std::byte* data, std::size_t size) {
  const std::size_t run = size / kStreams / kLine * kLine;
  Words sum[kStreams] = {};
  for (std::size_t at = 0; at < run; at += kLine) {
    for (std::size_t s = 0; s < kStreams; ++s) {
      const std::byte* line = data + s * run + at;
      if (kAhead != 0) __builtin_prefetch(line + kAhead, 0, 3);
      Words words;
      std::memcpy(&words, line, kLine);
      sum[s] += words;
    }
  }
  std::uint64_t total = 0;
  for (const Words& words : sum) {
    for (std::size_t i = 0; i < kLine / sizeof(std::uint64_t); ++i) total += words[i];
  }
  return total;
}

struct Pattern {
  const char* name;
  std::uint64_t (*read)(const std::byte*, std::size_t);
};

constexpr Pattern kPatterns[] = {
    {"1 stream", scan<1, 0>},
    {"1 stream, 4 KiB prefetch", scan<1, 4096>},
    {"2 streams, 2 KiB prefetch", scan<2, 2048>},
    {"4 streams", scan<4, 0>},
    {"4 streams, 1 KiB prefetch", scan<4, 1024>},
};

double seconds_of(const Pattern& pattern, const std::byte* data, std::size_t size,
                  unsigned threads) {
  const std::size_t part = size / threads / kLine * kLine;
  std::atomic<std::uint64_t> kept{0};  // so that no read can be left out
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  const auto work = [&](unsigned i) { kept += pattern.read(data + i * part, part); };
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& thread : others) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::vector<std::pair<std::string, double>> read_ceiling(const std::byte* data, std::size_t size,
                                                         unsigned threads) {
  std::vector<std::pair<std::string, double>> rates;
  for (const Pattern& pattern : kPatterns) {
    const double seconds = seconds_of(pattern, data, size, threads);
    rates.emplace_back(pattern.name, static_cast<double>(size) / seconds);
  }
  return rates;
}

}  // namespace neo::attn
