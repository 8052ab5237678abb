#include "layout/splits.hpp"

#include <algorithm>

namespace neo::layout {
namespace {

std::uint64_t cut(const wire::Geometry& g, const std::uint32_t* seq_lens, std::size_t n_rows,
                  std::uint64_t piece, std::vector<std::uint32_t>& splits) {
  std::uint64_t tasks = 0;
  for (std::size_t i = 0; i < n_rows; ++i) {
    const std::uint64_t pages = page_count(seq_lens[i], g.page_size);
    const std::uint64_t wanted = (seq_lens[i] + piece / 2) / piece;
    splits[i] = static_cast<std::uint32_t>(
        std::clamp<std::uint64_t>(wanted, 1, std::max<std::uint64_t>(pages, 1)));
    tasks += std::uint64_t{splits[i]} * g.n_kv_heads;
  }
  return tasks;
}

}  // namespace

std::vector<std::uint32_t> choose_splits(const wire::Geometry& g, const std::uint32_t* seq_lens,
                                         std::size_t n_rows, std::uint64_t wanted,
                                         std::uint32_t max_tasks) {
  std::vector<std::uint32_t> splits(n_rows, 1);
  std::uint64_t tokens = 0;
  for (std::size_t i = 0; i < n_rows; ++i) tokens += seq_lens[i];
  wanted = std::max<std::uint64_t>(wanted, 1);
  std::uint64_t piece = std::max<std::uint64_t>(kMinSplitTokens, tokens * g.n_kv_heads / wanted);
  // Ends: pieces longer than every sequence make one split a row.
  while (cut(g, seq_lens, n_rows, piece, splits) > max_tasks) piece *= 2;
  return splits;
}

}  // namespace neo::layout
