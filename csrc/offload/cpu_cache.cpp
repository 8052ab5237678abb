#include "offload/cpu_cache.hpp"

#include <stdexcept>
#include <string>

#include "ipc/atomics.hpp"
#include "layout/elements.hpp"

namespace neo::offload {
namespace {

void require_below(const char* field, std::uint64_t value, const char* limit_name,
                   std::uint64_t limit) {
  if (value < limit) return;
  throw std::out_of_range(std::string(field) + " is " + std::to_string(value) +
                          "; it must be below " + limit_name + ", " + std::to_string(limit));
}

}  // namespace

CpuCache::CpuCache(std::shared_ptr<ipc::Segment> segment,
                   std::shared_ptr<layout::Sequences> sequences, const wire::Geometry& geometry)
    : segment_(std::move(segment)),
      sequences_(std::move(sequences)),
      geometry_(geometry),
      layout_(geometry),
      act_row_bytes_(geometry.head_dim * layout::element_size(geometry.act_dtype)),
      kv_row_bytes_(geometry.head_dim * layout::element_size(geometry.kv_dtype)) {
  layout::check_segment(*segment_, wire::SegmentKind::cpu_cache, geometry);
}

void CpuCache::check_span(std::uint32_t layer, std::uint32_t slot, std::uint64_t start,
                          std::size_t n) const {
  require_below("layer", layer, "n_layers", geometry_.n_layers);
  require_below("slot", slot, "max_slots", geometry_.max_slots);
  if (n == 0) return;
  const std::uint64_t capacity = std::uint64_t{geometry_.max_pages} * geometry_.page_size;
  require_below("position", start + n - 1, "max_pages * page_size", capacity);
  for (std::uint64_t i = start / geometry_.page_size; i <= (start + n - 1) / geometry_.page_size;
       ++i) {
    require_below("page", sequences_->pages_of(slot)[i], "n_pages", geometry_.n_pages);
  }
}

void CpuCache::require_writable() const {
  if (!segment_->writable()) throw std::invalid_argument("the CPU-cache is mapped read-only");
}

std::byte* CpuCache::token(std::uint32_t layer, std::uint32_t slot, std::uint64_t position) const {
  const std::uint32_t page = sequences_->pages_of(slot)[position / geometry_.page_size];
  return segment_->data() + layout_.tile(geometry_, layer, page, 0) +
         position % geometry_.page_size * kv_row_bytes_;
}

void CpuCache::store_token(std::byte* to, const std::byte* k, const std::byte* v) {
  const auto from_type = static_cast<wire::DType>(geometry_.act_dtype);
  const auto to_type = static_cast<wire::DType>(geometry_.kv_dtype);
  for (std::uint32_t head = 0; head < geometry_.n_kv_heads; ++head) {
    const std::size_t from = std::size_t{head} * act_row_bytes_;
    std::byte* tile = to + head * 2 * layout_.tile_bytes;
    layout::convert(k + from, from_type, tile, to_type, geometry_.head_dim);
    layout::convert(v + from, from_type, tile + layout_.tile_bytes, to_type, geometry_.head_dim);
  }
}

void CpuCache::store_rows(std::uint32_t layer, const std::uint32_t* slots,
                          const std::uint32_t* positions, std::size_t n, const std::byte* k,
                          const std::byte* v) {
  require_writable();
  for (std::size_t i = 0; i < n; ++i) check_span(layer, slots[i], positions[i], 1);
  const std::size_t row = std::size_t{geometry_.n_kv_heads} * act_row_bytes_;
  for (std::size_t i = 0; i < n; ++i) {
    store_token(token(layer, slots[i], positions[i]), k + i * row, v + i * row);
  }
}

void CpuCache::store_span(std::uint32_t layer, std::uint32_t slot, std::uint32_t start,
                          std::size_t n, const std::byte* k, const std::byte* v) {
  require_writable();
  check_span(layer, slot, start, n);
  const std::size_t row = std::size_t{geometry_.n_kv_heads} * act_row_bytes_;
  for (std::size_t i = 0; i < n; ++i) {
    store_token(token(layer, slot, start + i), k + i * row, v + i * row);
  }
}

void CpuCache::load_span(std::uint32_t layer, std::uint32_t slot, std::uint32_t start,
                         std::size_t n, std::byte* k, std::byte* v) const {
  check_span(layer, slot, start, n);
  const auto from_type = static_cast<wire::DType>(geometry_.kv_dtype);
  const auto to_type = static_cast<wire::DType>(geometry_.act_dtype);
  const std::size_t row = std::size_t{geometry_.n_kv_heads} * act_row_bytes_;
  for (std::size_t i = 0; i < n; ++i) {
    const std::byte* from = token(layer, slot, start + i);
    for (std::uint32_t head = 0; head < geometry_.n_kv_heads; ++head) {
      const std::byte* tile = from + head * 2 * layout_.tile_bytes;
      const std::size_t to = i * row + std::size_t{head} * act_row_bytes_;
      layout::convert(tile, from_type, k + to, to_type, geometry_.head_dim);
      layout::convert(tile + layout_.tile_bytes, from_type, v + to, to_type, geometry_.head_dim);
    }
  }
}

const std::byte* CpuCache::find_tile(std::uint32_t layer, std::uint32_t slot,
                                     std::uint32_t page_index, std::uint32_t kv_head) const {
  if (layer >= geometry_.n_layers || slot >= geometry_.max_slots ||
      page_index >= geometry_.max_pages || kv_head >= geometry_.n_kv_heads) {
    return nullptr;
  }
  const std::uint32_t page = ipc::load_relaxed(sequences_->pages_of(slot) + page_index);
  if (page >= geometry_.n_pages) return nullptr;
  return segment_->data() + layout_.tile(geometry_, layer, page, kv_head);
}

}  // namespace neo::offload
