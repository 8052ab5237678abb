// Prefetches one page's K, then its V, while the page before it is computed.
//
// Included like paged_attention-inl.hpp, inside each instruction set's namespace. The lines go to
// the second-level cache (a page does not fit beside the work in the first), four neighbours at a
// time and evenly over the work: a burst fills the miss buffers and stalls the loads behind it.
// docs/decisions.md has the measurements.
#pragma once

constexpr std::uint32_t kLine = 64;
constexpr std::uint32_t kStepLines = 4;

class TilePrefetch {
 public:
  // The first `rows` of `page_size` rows of a K tile at `k` and of the V tile after it; of a full
  // page also what follows its rows (int8: the scales). nullptr: nothing to fetch.
  void start(const std::byte* k, std::uint64_t tile_bytes, std::uint32_t rows,
             std::uint32_t page_size, std::uint32_t row_bytes) {
    const std::uint64_t used = rows == page_size ? tile_bytes : std::uint64_t{rows} * row_bytes;
    at_ = k;
    end_ = k == nullptr ? k : k + used;
    v_ = k == nullptr ? k : k + tile_bytes;
    v_end_ = k == nullptr ? k : v_ + used;
  }

  // The next kStepLines lines, `n` times.
  void step(std::uint32_t n) {
    for (; n != 0; --n) {
      if (at_ >= end_) {
        if (end_ == v_end_) return;
        at_ = v_;
        end_ = v_end_;
      }
      for (std::uint32_t line = 0; line < kStepLines; ++line) {
        __builtin_prefetch(at_ + line * kLine, 0, 2);
      }
      at_ += kStepLines * kLine;
    }
  }

 private:
  const std::byte *at_, *end_, *v_, *v_end_;
};
