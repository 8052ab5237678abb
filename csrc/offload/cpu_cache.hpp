// Paged K and V in host memory: rows in, rows out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ipc/shm_segment.hpp"
#include "layout/segment_layout.hpp"
#include "layout/sequences.hpp"

namespace neo::offload {

// Rows are [n_kv_heads][head_dim] in act_dtype; the cache holds kv_dtype, int8 by
// layout::quantize. Indices that are out of
// range throw std::out_of_range before anything is written.
class CpuCache {
 public:
  // `n_threads`: how many threads share a long span.
  CpuCache(std::shared_ptr<ipc::Segment> segment, std::shared_ptr<layout::Sequences> sequences,
           const wire::Geometry& geometry, unsigned n_threads = 1);

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
  struct Place {
    std::byte* page;    // K tile of head 0
    std::uint32_t row;  // within the page
  };
  Place place(std::uint32_t layer, std::uint32_t slot, std::uint64_t position) const;
  void check_span(std::uint32_t layer, std::uint32_t slot, std::uint64_t start,
                  std::size_t n) const;
  void require_writable() const;
  // Calls part(first, end) for parts of [0, n) that end at page boundaries of [start, start + n).
  template <typename Part>
  void in_parallel(std::uint32_t start, std::size_t n, const Part& part) const;
  void store_token(const Place& place, const std::byte* k, const std::byte* v);
  void load_token(const Place& place, std::byte* k, std::byte* v) const;
  void store_row(std::byte* tile, std::uint32_t row, const std::byte* from);
  void load_row(const std::byte* tile, std::uint32_t row, std::byte* to) const;

  std::shared_ptr<ipc::Segment> segment_;
  std::shared_ptr<layout::Sequences> sequences_;
  wire::Geometry geometry_;
  layout::CacheLayout layout_;
  std::uint32_t act_row_bytes_;  // one head's row
  std::uint32_t kv_row_bytes_;
  unsigned n_threads_;
};

}  // namespace neo::offload
