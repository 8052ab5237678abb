// Paged K and V in host memory: rows in, rows out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ipc/shm_segment.hpp"
#include "layout/segment_layout.hpp"
#include "layout/sequences.hpp"

namespace neo::offload {

// Rows are [n_kv_heads][head_dim] in act_dtype; the cache holds kv_dtype. Indices that are out of
// range throw std::out_of_range before anything is written.
class CpuCache {
 public:
  CpuCache(std::shared_ptr<ipc::Segment> segment, std::shared_ptr<layout::Sequences> sequences,
           const wire::Geometry& geometry);

  void store_rows(std::uint32_t layer, const std::uint32_t* slots, const std::uint32_t* positions,
                  std::size_t n, const std::byte* k, const std::byte* v);
  void store_span(std::uint32_t layer, std::uint32_t slot, std::uint32_t start, std::size_t n,
                  const std::byte* k, const std::byte* v);
  void load_span(std::uint32_t layer, std::uint32_t slot, std::uint32_t start, std::size_t n,
                 std::byte* k, std::byte* v) const;

  // K tile of one page and head, or nullptr when the slot has no such page; V follows at
  // layout().tile_bytes. For readers of descriptors that may be stale.
  const std::byte* find_tile(std::uint32_t layer, std::uint32_t slot, std::uint32_t page_index,
                             std::uint32_t kv_head) const;

  const wire::Geometry& geometry() const { return geometry_; }
  const layout::CacheLayout& layout() const { return layout_; }

 private:
  // K bytes of (token, head 0); throws.
  std::byte* token(std::uint32_t layer, std::uint32_t slot, std::uint64_t position) const;
  void check_span(std::uint32_t layer, std::uint32_t slot, std::uint64_t start,
                  std::size_t n) const;
  void require_writable() const;
  void store_token(std::byte* to, const std::byte* k, const std::byte* v);

  std::shared_ptr<ipc::Segment> segment_;
  std::shared_ptr<layout::Sequences> sequences_;
  wire::Geometry geometry_;
  layout::CacheLayout layout_;
  std::uint32_t act_row_bytes_;  // one head's row
  std::uint32_t kv_row_bytes_;
};

}  // namespace neo::offload
