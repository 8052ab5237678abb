// gpu_worker's side of the hand-over to the cpu workers.
//
//   begin_plan ─▶ for each layer and channel with rows: publish ─▶ wait ─▶ collect ─▶ end_plan
//                                                        └ time is up ─▶ abort
//
// One plan at a time, one job in flight per channel. Or, where a device publishes and waits
//
//   announce ─▶ (the device, for each layer and channel: publish, wait, collect) ─▶ retire
//                                                     └ time is up ─▶ abort_through
//
// with as many plans in flight as there are descriptor slots. Jobs of riders, which outlive their
// plan, are Rides'. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "layout/control.hpp"
#include "layout/work.hpp"
#include "offload/collector.hpp"
#include "offload/decode_rows.hpp"
#include "offload/rides.hpp"

namespace neo::offload {

// The decode_cpu rows of each sub-batch.
using ChannelRows = std::array<DecodeRows, wire::kChannels>;

// What a device needs to know of a plan: job e of layer l has epoch first_epoch + l.
struct Announced {
  std::array<std::uint64_t, wire::kChannels> first_epoch;
  std::array<std::vector<wire::WorkRow>, wire::kChannels> rows;
  std::array<std::uint32_t, wire::kChannels> n_tasks;
  std::vector<AnnouncedMove> moves;
};

class Exchange {
 public:
  // Gives up whatever a predecessor left in flight.
  Exchange(std::shared_ptr<layout::Control> control, std::shared_ptr<ipc::Segment> work,
           std::shared_ptr<ipc::Segment> exchange, const wire::Geometry& geometry);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Throws std::invalid_argument or std::out_of_range for rows that do not fit the geometry.
  // `moves`: groups of riders, by stage.
  void begin_plan(std::uint64_t plan_id, const ChannelRows& rows,
                  const std::vector<Move>& moves = {});
  // q: [rows of the channel][n_heads][head_dim] in act_dtype.
  void publish(std::uint32_t channel, std::uint32_t layer, const std::byte* q);
  // False: not done within the time, or aborted.
  bool wait(std::uint32_t channel, std::uint64_t timeout_ns);
  void abort(std::uint32_t channel);
  bool aborted(std::uint32_t channel) const;
  // out: as q. Throws NativeError unless the job is done.
  void collect(std::uint32_t channel, std::byte* out);
  void end_plan();

  // Writes the descriptor and wakes the pool, which spins until the plan is retired. Throws as
  // begin_plan does, and NativeError while the descriptor's slot is another plan's.
  Announced announce(std::uint64_t plan_id, const ChannelRows& rows,
                     const std::vector<Move>& moves = {});
  // Gives up every job of the channel up to this epoch.
  void abort_through(std::uint32_t channel, std::uint64_t epoch);
  // The epoch of the channel's last finished job.
  std::uint64_t done_epoch(std::uint32_t channel) const;
  // Once the device is through with the plan.
  void retire(std::uint64_t plan_id);

  Rides& rides() { return rides_; }
  const std::vector<AnnouncedMove>& moves() const { return moves_; }
  std::uint32_t live_workers() const { return control_->ready_workers(); }
  std::size_t n_rows(std::uint32_t channel) const;
  std::uint32_t n_tasks(std::uint32_t channel) const { return state(channel).n_tasks; }
  const wire::Geometry& geometry() const { return geometry_; }

 private:
  struct ChannelState {
    std::uint64_t first_epoch = 0;  // of the plan
    std::uint64_t next_epoch = 1;   // first that was never given to a plan
    std::uint64_t epoch = 0;        // of the job last published in this plan; 0: none
    std::uint32_t n_tasks = 0;
    std::vector<wire::WorkRow> rows;
  };

  const ChannelState& state(std::uint32_t channel) const;
  ChannelState& state(std::uint32_t channel);
  bool prepare(std::uint64_t plan_id, const ChannelRows& rows, const std::vector<Move>& moves);
  void prepare_channel(std::uint32_t channel, const DecodeRows& rows);
  void write_desc(std::uint64_t plan_id);
  void retire_desc(std::uint32_t plan);
  void leave(bool had_rows, bool device);

  std::shared_ptr<layout::Control> control_;
  std::shared_ptr<ipc::Segment> exchange_;
  wire::Geometry geometry_;
  layout::Work work_;
  layout::ExchangeLayout layout_;
  std::array<ChannelState, wire::kChannels> channels_;
  Collector collector_;
  Rides rides_;
  std::vector<AnnouncedMove> moves_;  // of the plan begun last
  std::uint32_t plan_ = 0;            // descriptor slot
  bool in_plan_ = false;
};

}  // namespace neo::offload
