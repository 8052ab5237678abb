#include "attn_worker/task_runner.hpp"

#include <cmath>

#include "layout/elements.hpp"

namespace neo::attn_worker {

TaskRunner::TaskRunner(const offload::CpuCache& cache, attn::Kernel kernel)
    : cache_(cache),
      kernel_(kernel),
      scale_(1.0f / std::sqrt(static_cast<float>(cache.geometry().head_dim))),
      q_(layout::group_size(cache.geometry()) * cache.geometry().head_dim) {
  tiles_.reserve(cache.geometry().max_pages);
}

// Empty when the task cannot be right.
layout::TokenRange TaskRunner::range_of(const Task& task) const {
  const wire::Geometry& g = cache_.geometry();
  const std::uint64_t capacity = std::uint64_t{g.max_pages} * g.page_size;
  if (task.n_splits == 0 || task.split >= task.n_splits || task.kv_head >= g.n_kv_heads ||
      task.seq_len > capacity) {
    return {0, 0};
  }
  return layout::split_range(task.seq_len, g.page_size, task.n_splits, task.split);
}

bool TaskRunner::resolve_tiles(const Task& task, const layout::TokenRange& range) {
  const std::uint32_t page_size = cache_.geometry().page_size;
  tiles_.clear();
  for (std::uint32_t page = range.first / page_size; page * page_size < range.end; ++page) {
    const std::byte* tile = cache_.find_tile(task.layer, task.slot, page, task.kv_head);
    if (tile == nullptr) return false;
    tiles_.push_back(tile);
  }
  return true;
}

void TaskRunner::widen_query(const std::byte* q_row, std::uint32_t kv_head) {
  const auto dtype = static_cast<wire::DType>(cache_.geometry().act_dtype);
  const std::size_t at = kv_head * q_.size() * layout::element_size(cache_.geometry().act_dtype);
  layout::to_floats(q_row + at, dtype, q_.data(), q_.size());
}

std::uint64_t TaskRunner::run(const Task& task, const std::byte* q_row, std::byte* area,
                              const Task* next) {
  const wire::Geometry& g = cache_.geometry();
  const layout::TokenRange range = range_of(task);
  if (range.first >= range.end || !resolve_tiles(task, range)) return 0;
  widen_query(q_row, task.kv_head);
  attn::TaskInput in{};
  in.q = q_.data();
  in.scale = scale_;
  in.group = layout::group_size(g);
  in.head_dim = g.head_dim;
  in.page_size = g.page_size;
  in.kv_dtype = static_cast<wire::DType>(g.kv_dtype);
  in.tile_bytes = cache_.layout().tile_bytes;
  in.tiles = tiles_.data();
  in.n_tokens = range.end - range.first;
  if (next != nullptr) {
    const std::uint32_t page = range_of(*next).first / g.page_size;
    in.next_tile = cache_.find_tile(next->layer, next->slot, page, next->kv_head);
  }
  auto* o = reinterpret_cast<float*>(area);
  float* m = o + in.group * in.head_dim;
  kernel_(in, {o, m, m + in.group});
  return 2ULL * in.n_tokens * cache_.layout().token_bytes(g);
}

}  // namespace neo::attn_worker
