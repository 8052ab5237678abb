// How a sequence is cut into attention tasks. Both sides of the exchange compute the same cut.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/geometry.hpp"
#include "protos/wire.hpp"

namespace neo::layout {

// A split below this costs more in claiming and merging than it gains.
inline constexpr std::uint32_t kMinSplitTokens = 256;
// Tasks per thread: enough that threads finish at about the same time though tasks differ.
inline constexpr std::uint32_t kTasksPerThread = 4;

struct TokenRange {
  std::uint32_t first, end;
};

constexpr std::uint32_t page_count(std::uint32_t seq_len, std::uint32_t page_size) {
  return seq_len / page_size + (seq_len % page_size != 0 ? 1 : 0);
}

// Split `split` of `n_splits`: whole pages, sizes that differ by one page at most.
constexpr TokenRange split_range(std::uint32_t seq_len, std::uint32_t page_size,
                                 std::uint32_t n_splits, std::uint32_t split) {
  const std::uint64_t pages = page_count(seq_len, page_size);
  const std::uint64_t first = pages * split / n_splits * page_size;
  const std::uint64_t end = pages * (split + 1ULL) / n_splits * page_size;
  return {static_cast<std::uint32_t>(first < seq_len ? first : seq_len),
          static_cast<std::uint32_t>(end < seq_len ? end : seq_len)};
}

// Splits of each row, so that all rows together make some `wanted` tasks where their lengths allow,
// and never more than max_tasks. Long rows are cut first: a row is cut into pieces of an even share
// of all tokens. Requires rows x n_kv_heads <= max_tasks.
std::vector<std::uint32_t> choose_splits(const wire::Geometry& geometry,
                                         const std::uint32_t* seq_lens, std::size_t n_rows,
                                         std::uint64_t wanted, std::uint32_t max_tasks);

}  // namespace neo::layout
