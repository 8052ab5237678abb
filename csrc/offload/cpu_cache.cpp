#include "offload/cpu_cache.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

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
                   std::shared_ptr<layout::Sequences> sequences, const wire::Geometry& geometry,
                   unsigned n_threads)
    : segment_(std::move(segment)),
      sequences_(std::move(sequences)),
      geometry_(geometry),
      layout_(geometry),
      act_row_bytes_(geometry.head_dim * layout::element_size(geometry.act_dtype)),
      kv_row_bytes_(geometry.head_dim * layout::element_size(geometry.kv_dtype)),
      n_threads_(std::max(n_threads, 1u)) {
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

template <typename Part>
void CpuCache::in_parallel(std::uint32_t start, std::size_t n, const Part& part) const {
  // A thread costs some 30 us to start, as much as copying a few hundred KiB.
  constexpr std::uint64_t kBytesPerThread = 1 << 20;
  const std::uint64_t bytes = 2ULL * n * geometry_.n_kv_heads * act_row_bytes_;
  const std::uint64_t threads = std::clamp<std::uint64_t>(bytes / kBytesPerThread, 1, n_threads_);
  const std::size_t size = geometry_.page_size;
  const std::size_t pages = (start % size + n + size - 1) / size;
  // Where part i ends, counted from `start`.
  const auto end_of = [&](std::uint64_t i) {
    const std::size_t end = (pages * (i + 1) / threads) * size;
    return i + 1 == threads ? n : std::min(n, end > start % size ? end - start % size : 0);
  };
  std::vector<std::thread> helpers;
  for (std::uint64_t i = 1; i < threads; ++i) {
    helpers.emplace_back([&part, &end_of, i] { part(end_of(i - 1), end_of(i)); });
  }
  part(0, end_of(0));
  for (auto& helper : helpers) helper.join();
}

CpuCache::Place CpuCache::place(std::uint32_t layer, std::uint32_t slot,
                                std::uint64_t position) const {
  const std::uint32_t page = sequences_->pages_of(slot)[position / geometry_.page_size];
  return {segment_->data() + layout_.tile(geometry_, layer, page, 0),
          static_cast<std::uint32_t>(position % geometry_.page_size)};
}

void CpuCache::store_row(std::byte* tile, std::uint32_t row, const std::byte* from) {
  const auto from_type = static_cast<wire::DType>(geometry_.act_dtype);
  const auto to_type = static_cast<wire::DType>(geometry_.kv_dtype);
  std::byte* to = tile + std::size_t{row} * kv_row_bytes_;
  if (to_type != wire::DType::int8) {
    layout::convert(from, from_type, to, to_type, geometry_.head_dim);
    return;
  }
  float wide[layout::kMaxHeadDim];
  layout::to_floats(from, from_type, wide, geometry_.head_dim);
  auto* scales = reinterpret_cast<float*>(tile + layout_.scales_at(geometry_));
  scales[row] = layout::quantize(wide, reinterpret_cast<std::int8_t*>(to), geometry_.head_dim);
}

void CpuCache::load_row(const std::byte* tile, std::uint32_t row, std::byte* to) const {
  const auto from_type = static_cast<wire::DType>(geometry_.kv_dtype);
  const auto to_type = static_cast<wire::DType>(geometry_.act_dtype);
  const std::byte* from = tile + std::size_t{row} * kv_row_bytes_;
  if (from_type != wire::DType::int8) {
    layout::convert(from, from_type, to, to_type, geometry_.head_dim);
    return;
  }
  const auto* scales = reinterpret_cast<const float*>(tile + layout_.scales_at(geometry_));
  const auto* quantized = reinterpret_cast<const std::int8_t*>(from);
  float wide[layout::kMaxHeadDim];
  for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
    wide[d] = scales[row] * static_cast<float>(quantized[d]);
  }
  layout::from_floats(wide, to, to_type, geometry_.head_dim);
}

void CpuCache::store_token(const Place& place, const std::byte* k, const std::byte* v) {
  for (std::uint32_t head = 0; head < geometry_.n_kv_heads; ++head) {
    const std::size_t from = std::size_t{head} * act_row_bytes_;
    std::byte* tile = place.page + head * 2 * layout_.tile_bytes;
    store_row(tile, place.row, k + from);
    store_row(tile + layout_.tile_bytes, place.row, v + from);
  }
}

void CpuCache::load_token(const Place& place, std::byte* k, std::byte* v) const {
  for (std::uint32_t head = 0; head < geometry_.n_kv_heads; ++head) {
    const std::size_t to = std::size_t{head} * act_row_bytes_;
    const std::byte* tile = place.page + head * 2 * layout_.tile_bytes;
    load_row(tile, place.row, k + to);
    load_row(tile + layout_.tile_bytes, place.row, v + to);
  }
}

void CpuCache::store_rows(std::uint32_t layer, const std::uint32_t* slots,
                          const std::uint32_t* positions, std::size_t n, const std::byte* k,
                          const std::byte* v) {
  require_writable();
  for (std::size_t i = 0; i < n; ++i) check_span(layer, slots[i], positions[i], 1);
  const std::size_t row = std::size_t{geometry_.n_kv_heads} * act_row_bytes_;
  for (std::size_t i = 0; i < n; ++i) {
    store_token(place(layer, slots[i], positions[i]), k + i * row, v + i * row);
  }
}

void CpuCache::store_span(std::uint32_t layer, std::uint32_t slot, std::uint32_t start,
                          std::size_t n, const std::byte* k, const std::byte* v) {
  require_writable();
  check_span(layer, slot, start, n);
  const std::size_t row = std::size_t{geometry_.n_kv_heads} * act_row_bytes_;
  in_parallel(start, n, [&](std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) {
      store_token(place(layer, slot, start + i), k + i * row, v + i * row);
    }
  });
}

void CpuCache::load_span(std::uint32_t layer, std::uint32_t slot, std::uint32_t start,
                         std::size_t n, std::byte* k, std::byte* v) const {
  check_span(layer, slot, start, n);
  const std::size_t row = std::size_t{geometry_.n_kv_heads} * act_row_bytes_;
  in_parallel(start, n, [&](std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) {
      load_token(place(layer, slot, start + i), k + i * row, v + i * row);
    }
  });
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
