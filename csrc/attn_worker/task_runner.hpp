// Computes one task: resolves pages into tiles, widens the query, calls the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attn/paged_attention.hpp"
#include "layout/splits.hpp"
#include "offload/cpu_cache.hpp"

namespace neo::attn_worker {

struct Task {
  std::uint32_t layer;
  std::uint32_t slot;
  std::uint32_t seq_len;
  std::uint32_t kv_head;
  std::uint32_t split;
  std::uint32_t n_splits;
};

// One per thread: owns the scratch.
class TaskRunner {
 public:
  TaskRunner(const offload::CpuCache& cache, attn::Kernel kernel);

  // q_row: [n_heads][head_dim] in act_dtype, attention scale not applied. area: O, m, l as in
  // wire.hpp, written here only. Returns the bytes of K and V read; 0 when the task cannot be
  // right (an index out of range: the descriptor was stale), and nothing is written then.
  // `next`: what this thread is likely to run afterwards, or nullptr; only its first page is
  // prefetched, so that it may be wrong or stale.
  std::uint64_t run(const Task& task, const std::byte* q_row, std::byte* area,
                    const Task* next = nullptr);

 private:
  layout::TokenRange range_of(const Task& task) const;
  bool resolve_tiles(const Task& task, const layout::TokenRange& range);
  void widen_query(const std::byte* q_row, std::uint32_t kv_head);

  const offload::CpuCache& cache_;
  attn::Kernel kernel_;
  float scale_;
  std::vector<float> q_;                 // [group][head_dim]
  std::vector<const std::byte*> tiles_;  // of the current task
};

}  // namespace neo::attn_worker
