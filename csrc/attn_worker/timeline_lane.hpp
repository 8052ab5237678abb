// One thread's lane of the timeline segment (protos/timeline.hpp). Empty where no timeline is
// recorded: then a task costs one predictable branch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ipc/atomics.hpp"
#include "protos/timeline.hpp"

namespace neo::attn_worker {

class TimelineLane {
 public:
  TimelineLane() = default;

  // Takes a free lane, or none where all are taken or the memory is no timeline.
  static TimelineLane take(std::byte* memory, std::uint64_t bytes, std::int32_t pid,
                           std::uint32_t worker, std::uint32_t thread) {
    TimelineLane lane;
    auto* header = reinterpret_cast<wire::TimelineHeader*>(memory);
    if (bytes < sizeof(*header) || header->magic != wire::kTimelineMagic) return lane;
    const std::uint64_t one = sizeof(wire::LaneHeader) + header->n_spans * sizeof(wire::Span);
    if (header->n_spans == 0 || bytes < sizeof(*header) + header->n_lanes * one) return lane;
    const std::uint32_t index = ipc::add(&header->next_lane, 1u);
    if (index >= header->n_lanes) return lane;
    auto* lanes = reinterpret_cast<wire::LaneHeader*>(header + 1);
    lane.header_ = header;
    lane.lane_ = lanes + index;
    lane.spans_ = reinterpret_cast<wire::Span*>(lanes + header->n_lanes) +
                  std::uint64_t{index} * header->n_spans;
    lane.lane_->worker = worker;
    lane.lane_->thread = thread;
    lane.lane_->pid = pid;
    return lane;
  }

  bool on() const { return header_ != nullptr && ipc::load_relaxed(&header_->on) != 0; }

  void add(const wire::Span& span) {
    const std::uint64_t count = ipc::load_relaxed(&lane_->count);
    spans_[count % header_->n_spans] = span;
    ipc::store_release(&lane_->count, count + 1);  // pairs with the reader's load of it
  }

 private:
  wire::TimelineHeader* header_ = nullptr;
  wire::LaneHeader* lane_ = nullptr;
  wire::Span* spans_ = nullptr;
};

}  // namespace neo::attn_worker
