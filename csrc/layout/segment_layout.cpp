#include "layout/segment_layout.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "ipc/errors.hpp"

namespace neo::layout {

using wire::Geometry;
using wire::SegmentKind;

ControlLayout::ControlLayout(std::uint32_t max_workers) {
  geometry = sizeof(wire::SegmentHeader);
  server = geometry + sizeof(Geometry);
  workers = server + sizeof(wire::ServerRow);
  core_leases = workers + std::uint64_t{max_workers} * sizeof(wire::WorkerRow);
  size = core_leases + wire::kMaxCores * sizeof(std::uint32_t);
}

StepLayout::StepLayout(const Geometry& g) {
  rows = sizeof(wire::StepHeader);
  swaps = round_up(rows + std::uint64_t{g.max_rows} * sizeof(wire::StepRow), kLine);
  tokens = round_up(swaps + std::uint64_t{g.max_swaps} * sizeof(wire::Swap), kLine);
  slot_bytes = round_up(tokens + std::uint64_t{g.max_tokens} * sizeof(std::int32_t), kLine);
}

ResultLayout::ResultLayout(const Geometry& g) {
  rows = sizeof(wire::ResultHeader);
  logprobs = round_up(rows + std::uint64_t{g.max_rows} * sizeof(wire::ResultRow), kLine);
  n_logprobs = std::uint64_t{g.max_rows} + g.max_tokens;
  top = round_up(logprobs + n_logprobs * sizeof(wire::LogprobEntry), kLine);
  slot_bytes = round_up(top + n_logprobs * g.max_logprobs * sizeof(wire::TokenLogprob), kLine);
}

SequencesLayout::SequencesLayout(const Geometry& g) {
  const std::uint64_t slots = g.max_slots;
  params = sizeof(wire::SegmentHeader);
  block_table = params + slots * sizeof(wire::SlotParams);
  page_table = round_up(block_table + slots * g.max_blocks * sizeof(std::uint32_t), kLine);
  bias = round_up(page_table + slots * g.max_pages * sizeof(std::uint32_t), kLine);
  size = round_up(bias + slots * wire::kMaxBiases * sizeof(wire::TokenBias), kLine);
}

WorkLayout::WorkLayout(const Geometry& g) {
  bell = sizeof(wire::SegmentHeader);
  channels = bell + sizeof(wire::Doorbell);
  descs = channels + wire::kChannels * sizeof(wire::Channel);
  rows = descs + std::uint64_t{g.n_plans} * sizeof(wire::WorkDesc);
  const std::uint64_t n_rows = std::uint64_t{g.n_plans} * wire::kChannels * g.max_rows;
  ride_queue = round_up(rows + n_rows * sizeof(wire::WorkRow), kLine);
  ride_done = ride_queue + sizeof(wire::RideQueue);
  ride_descs = ride_done + std::uint64_t{g.ride_groups} * sizeof(wire::Doorbell);
  ride_rows = ride_descs + std::uint64_t{n_ride_descs(g)} * sizeof(wire::RideDesc);
  const std::uint64_t riders = std::uint64_t{n_ride_descs(g)} * g.ride_capacity;
  tasks = round_up(ride_rows + riders * sizeof(wire::WorkRow), kLine);
  size = round_up(tasks + first_task(g, n_channels(g)) * sizeof(std::uint64_t), kLine);
}

ExchangeLayout::ExchangeLayout(const Geometry& g) {
  q = sizeof(wire::SegmentHeader);
  q_row_bytes = std::uint64_t{g.n_heads} * g.head_dim * element_size(g.act_dtype);
  // Each worker's areas start on a page, so that populating one touches no other's.
  areas = round_up(q + first_row(g, n_channels(g)) * q_row_bytes, 4096);
  area_bytes = round_up((g.head_dim + 2ULL) * group_size(g) * sizeof(float), kLine);
  worker_area_bytes = round_up(first_task(g, n_channels(g)) * area_bytes, 4096);
  size = areas + g.max_workers * worker_area_bytes;
}

CacheLayout::CacheLayout(const Geometry& g) {
  const bool scaled = g.kv_dtype == static_cast<std::uint32_t>(wire::DType::int8);
  tile_bytes = g.page_size * (std::uint64_t{g.head_dim} * element_size(g.kv_dtype) +
                              (scaled ? sizeof(float) : 0));
  size = kCacheHeader + std::uint64_t{g.n_layers} * g.n_pages * g.n_kv_heads * 2 * tile_bytes;
}

namespace {

std::uint64_t ring_bytes(std::uint64_t n_slots, std::uint64_t slot_bytes) {
  return sizeof(wire::SegmentHeader) + sizeof(wire::RingHeader) + n_slots * slot_bytes;
}

void format_ring(std::byte* data, std::uint32_t n_slots, std::uint64_t slot_bytes) {
  auto* ring = reinterpret_cast<wire::RingHeader*>(data + sizeof(wire::SegmentHeader));
  ring->n_slots = n_slots;
  ring->slot_bytes = slot_bytes;
}

// Fresh shared memory is zero, which is what every other table starts with.
void format(std::byte* data, SegmentKind kind, const Geometry& g) {
  if (kind == SegmentKind::control) {
    std::memcpy(data + ControlLayout(g.max_workers).geometry, &g, sizeof(g));
  } else if (kind == SegmentKind::steps) {
    format_ring(data, g.n_plans, StepLayout(g).slot_bytes);
  } else if (kind == SegmentKind::results) {
    format_ring(data, g.n_plans, ResultLayout(g).slot_bytes);
  }
}

}  // namespace

std::uint64_t segment_bytes(const Geometry& g, SegmentKind kind) {
  switch (kind) {
    case SegmentKind::control:
      return ControlLayout(g.max_workers).size;
    case SegmentKind::steps:
      return ring_bytes(g.n_plans, StepLayout(g).slot_bytes);
    case SegmentKind::results:
      return ring_bytes(g.n_plans, ResultLayout(g).slot_bytes);
    case SegmentKind::sequences:
      return SequencesLayout(g).size;
    case SegmentKind::work:
      return WorkLayout(g).size;
    case SegmentKind::exchange:
      return ExchangeLayout(g).size;
    case SegmentKind::cpu_cache:
      return CacheLayout(g).size;
  }
  throw std::invalid_argument("kind is " + std::to_string(static_cast<std::uint32_t>(kind)) +
                              "; it must be from 1 to 7");
}

std::shared_ptr<ipc::Segment> create_segment(int fd, SegmentKind kind, const Geometry& g,
                                             unsigned threads) {
  validate_geometry(g);
  ipc::SegmentSpec spec{kind, g.rank, segment_bytes(g, kind), 0};
  spec.populated = kind == SegmentKind::exchange ? ExchangeLayout(g).areas : spec.size;
  return ipc::Segment::create(fd, spec, threads, [&](std::byte* data) { format(data, kind, g); });
}

void check_segment(const ipc::Segment& segment, SegmentKind kind, const Geometry& g) {
  if (segment.header().kind != static_cast<std::uint32_t>(kind)) {
    throw LayoutMismatchError("segment kind is " + std::to_string(segment.header().kind) +
                              ", wanted " + std::to_string(static_cast<std::uint32_t>(kind)));
  }
  const std::uint64_t wanted = segment_bytes(g, kind);
  if (segment.size() != wanted) {
    throw LayoutMismatchError("segment of kind " + std::to_string(segment.header().kind) + " has " +
                              std::to_string(segment.size()) + " bytes, this geometry needs " +
                              std::to_string(wanted));
  }
}

}  // namespace neo::layout
