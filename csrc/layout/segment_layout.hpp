// Offsets and sizes of everything in every segment: the one place that turns a Geometry into bytes.
//
// The structs are wire.hpp's; this file only says where they lie. Offsets count from the segment's
// first byte; every table starts on a cache line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ipc/shm_segment.hpp"
#include "layout/geometry.hpp"
#include "protos/wire.hpp"

namespace neo::layout {

inline constexpr std::uint64_t kLine = 64;
inline constexpr std::uint64_t kCacheHeader = 4096;  // the CPU-cache starts on a page

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}

struct ControlLayout {
  std::uint64_t geometry, server, workers, core_leases, size;
  explicit ControlLayout(std::uint32_t max_workers);
};

struct StepLayout {  // within a ring slot
  std::uint64_t rows, swaps, tokens, slot_bytes;
  explicit StepLayout(const wire::Geometry& g);
};

struct ResultLayout {  // within a ring slot
  std::uint64_t rows, logprobs, top, slot_bytes;
  std::uint64_t n_logprobs;  // entries that there is room for
  explicit ResultLayout(const wire::Geometry& g);
};

struct SequencesLayout {
  std::uint64_t params, block_table, page_table, bias, size;
  explicit SequencesLayout(const wire::Geometry& g);
};

struct WorkLayout {
  std::uint64_t bell, channels, descs, rows, tasks, size;
  std::uint64_t ride_queue, ride_done, ride_descs, ride_rows;
  explicit WorkLayout(const wire::Geometry& g);
};

struct ExchangeLayout {
  std::uint64_t q, q_row_bytes, areas;
  std::uint64_t area_bytes;         // of one task
  std::uint64_t worker_area_bytes;  // of one worker row: all channels and tasks
  std::uint64_t size;
  explicit ExchangeLayout(const wire::Geometry& g);

  std::uint64_t q_row(const wire::Geometry& g, std::uint32_t channel, std::uint32_t row) const {
    return q + (first_row(g, channel) + row) * q_row_bytes;
  }
  std::uint64_t area(const wire::Geometry& g, std::uint32_t worker, std::uint32_t channel,
                     std::uint32_t task) const {
    return areas + worker * worker_area_bytes + (first_task(g, channel) + task) * area_bytes;
  }
};

struct CacheLayout {
  // K (or V) of one layer, page and head: [page_size][head_dim], for int8 then float32
  // scale[page_size], so that a page's rows and scales are one contiguous read.
  std::uint64_t tile_bytes;
  std::uint64_t size;
  explicit CacheLayout(const wire::Geometry& g);

  // One token of one head, K or V, with its scale.
  std::uint64_t token_bytes(const wire::Geometry& g) const { return tile_bytes / g.page_size; }

  // From a tile's first byte to its scales (int8).
  std::uint64_t scales_at(const wire::Geometry& g) const {
    return std::uint64_t{g.page_size} * g.head_dim;
  }

  // Where the K tile lies; its V tile follows it. A change of the cache's layout is a change here.
  std::uint64_t tile(const wire::Geometry& g, std::uint32_t layer, std::uint32_t page,
                     std::uint32_t kv_head) const {
    const std::uint64_t pair = (std::uint64_t{layer} * g.n_pages + page) * g.n_kv_heads + kv_head;
    return kCacheHeader + pair * 2 * tile_bytes;
  }
};

std::uint64_t segment_bytes(const wire::Geometry& g, wire::SegmentKind kind);

// Validates the geometry, then creates and formats the segment. All memory is populated but the
// exchange's output areas, which each worker populates for itself when it joins.
std::shared_ptr<ipc::Segment> create_segment(int fd, wire::SegmentKind kind,
                                             const wire::Geometry& g, unsigned threads);

// Throws LayoutMismatchError unless the segment is of this kind and of this geometry's size.
void check_segment(const ipc::Segment& segment, wire::SegmentKind kind, const wire::Geometry& g);

}  // namespace neo::layout
