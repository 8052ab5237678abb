#include "offload/exchange.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ipc/doorbell.hpp"
#include "ipc/errors.hpp"
#include "layout/splits.hpp"

namespace neo::offload {

Exchange::Exchange(std::shared_ptr<layout::Control> control, std::shared_ptr<ipc::Segment> work,
                   std::shared_ptr<ipc::Segment> exchange, const wire::Geometry& geometry)
    : control_(std::move(control)),
      exchange_(std::move(exchange)),
      geometry_(geometry),
      work_(std::move(work), geometry),
      layout_(geometry),
      collector_(work_, exchange_, geometry),
      rides_(control_, work_, exchange_, geometry) {
  layout::check_segment(*exchange_, wire::SegmentKind::exchange, geometry);
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    wire::Channel* channel = work_.channel(c);
    const std::uint64_t published = ipc::load_acquire(&channel->published.value);
    ipc::max_store(&channel->abort, published);
    channels_[c].next_epoch = published + 1;
    for (std::uint32_t plan = 0; plan < geometry_.n_plans; ++plan) {
      const std::uint64_t first = ipc::load_acquire(&work_.desc(plan)->first_epoch[c]);
      if (first == 0) continue;
      const std::uint64_t after = first + work_.desc(plan)->n_layers;
      channels_[c].next_epoch = std::max(channels_[c].next_epoch, after);
    }
  }
  for (std::uint32_t plan = 0; plan < geometry_.n_plans; ++plan) retire_desc(plan);
  ipc::store_release(&control_->server()->active, 0u);
  ipc::store_release(&control_->server()->device_plans, 0u);
}

Exchange::~Exchange() {
  if (in_plan_) end_plan();
}

const Exchange::ChannelState& Exchange::state(std::uint32_t channel) const {
  if (channel >= wire::kChannels) {
    throw std::out_of_range("channel is " + std::to_string(channel) + "; it must be below " +
                            std::to_string(wire::kChannels));
  }
  return channels_[channel];
}

Exchange::ChannelState& Exchange::state(std::uint32_t channel) {
  return const_cast<ChannelState&>(static_cast<const Exchange*>(this)->state(channel));
}

std::size_t Exchange::n_rows(std::uint32_t channel) const { return state(channel).rows.size(); }

void Exchange::prepare_channel(std::uint32_t channel, const DecodeRows& rows) {
  ChannelState& s = channels_[channel];
  const std::uint64_t wanted = std::uint64_t{layout::kTasksPerThread} * control_->ready_threads();
  const auto splits = layout::choose_splits(
      geometry_, rows.seq_lens, rows.n, std::max<std::uint64_t>(wanted, layout::kTasksPerThread),
      geometry_.max_tasks);
  s.rows.clear();
  s.n_tasks = 0;
  s.epoch = 0;
  for (std::size_t i = 0; i < rows.n; ++i) {
    s.rows.push_back({rows.slots[i], rows.seq_lens[i], s.n_tasks, splits[i]});
    s.n_tasks += splits[i] * geometry_.n_kv_heads;
  }
  s.first_epoch = rows.n != 0 ? s.next_epoch : 0;
  if (rows.n != 0) s.next_epoch += geometry_.n_layers;
}

void Exchange::retire_desc(std::uint32_t plan) {
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    ipc::store_relaxed(&work_.desc(plan)->first_epoch[c], std::uint64_t{0});
  }
  ipc::release_fence();  // before any later change of the descriptor; pairs with find_job's
}

void Exchange::write_desc(std::uint64_t plan_id) {
  retire_desc(plan_);
  wire::WorkDesc* desc = work_.desc(plan_);
  desc->plan_id = plan_id;
  ipc::store_relaxed(&desc->n_layers, geometry_.n_layers);
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    const ChannelState& s = channels_[c];
    ipc::store_relaxed(&desc->n_rows[c], static_cast<std::uint32_t>(s.rows.size()));
    ipc::store_relaxed(&desc->n_tasks[c], s.n_tasks);
    wire::WorkRow* rows = work_.rows(plan_, c);
    for (std::size_t i = 0; i < s.rows.size(); ++i) {
      ipc::store_relaxed(&rows[i].slot, s.rows[i].slot);
      ipc::store_relaxed(&rows[i].seq_len, s.rows[i].seq_len);
      ipc::store_relaxed(&rows[i].first_task, s.rows[i].first_task);
      ipc::store_relaxed(&rows[i].n_splits, s.rows[i].n_splits);
    }
  }
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    ipc::store_release(&desc->first_epoch[c], channels_[c].first_epoch);
  }
}

// True: the plan has rows.
bool Exchange::prepare(std::uint64_t plan_id, const ChannelRows& rows,
                       const std::vector<Move>& moves) {
  if (in_plan_) throw NativeError("a plan begins before end_plan of the plan in flight");
  std::size_t n = rows[0].n + rows[1].n;
  for (const Move& move : moves) n += move.rows.n;
  if (n > geometry_.max_rows) {
    throw std::invalid_argument("the plan has " + std::to_string(n) + " rows; max_rows is " +
                                std::to_string(geometry_.max_rows));
  }
  for (const DecodeRows& r : rows) check_rows(geometry_, r);
  rides_.check(moves);
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) prepare_channel(c, rows[c]);
  plan_ = static_cast<std::uint32_t>(plan_id % geometry_.n_plans);
  write_desc(plan_id);
  moves_ = rides_.begin(plan_, moves);
  return n != 0;
}

void Exchange::begin_plan(std::uint64_t plan_id, const ChannelRows& rows,
                          const std::vector<Move>& moves) {
  const bool has_rows = prepare(plan_id, rows, moves);
  in_plan_ = true;
  if (!has_rows) return;
  ipc::add(&control_->server()->active, 1u);
  // Workers that spin are woken here, ahead of the first publish, which may come from a device.
  ipc::ring(work_.bell(), ipc::load_relaxed(&work_.bell()->value) + 1);
}

void Exchange::publish(std::uint32_t channel, std::uint32_t layer, const std::byte* q) {
  ChannelState& s = state(channel);
  wire::Channel* shared = work_.channel(channel);
  if (!in_plan_ || s.rows.empty()) throw NativeError("publish on a channel without rows");
  const std::uint64_t epoch = s.first_epoch + layer;
  if (layer >= geometry_.n_layers || epoch <= s.epoch) {
    throw std::invalid_argument("layer is " + std::to_string(layer) +
                                "; layers must grow and be below n_layers, " +
                                std::to_string(geometry_.n_layers));
  }
  if (s.epoch != 0 && !ipc::reached(&shared->done, s.epoch) && !aborted(channel)) {
    throw NativeError("publish while the channel's last job is neither done nor aborted");
  }
  std::memcpy(exchange_->data() + layout_.q_row(geometry_, channel, 0), q,
              s.rows.size() * layout_.q_row_bytes);
  s.epoch = epoch;
  // Release: Q, K and V before the epoch; pairs with the workers' acquire load of it.
  ipc::store_release(&shared->published.value, epoch);
  ipc::ring(work_.bell(), ipc::load_relaxed(&work_.bell()->value) + 1);
}

bool Exchange::wait(std::uint32_t channel, std::uint64_t timeout_ns) {
  const ChannelState& s = state(channel);
  if (s.epoch == 0) throw NativeError("wait without a published job");
  wire::Channel* shared = work_.channel(channel);
  if (aborted(channel)) return ipc::reached(&shared->done, s.epoch);
  return ipc::wait(&shared->done, s.epoch, timeout_ns, geometry_.spin_us);
}

void Exchange::abort(std::uint32_t channel) {
  const ChannelState& s = state(channel);
  if (s.epoch != 0) ipc::max_store(&work_.channel(channel)->abort, s.epoch);
}

bool Exchange::aborted(std::uint32_t channel) const {
  const ChannelState& s = state(channel);
  return s.epoch != 0 && ipc::load_acquire(&work_.channel(channel)->abort) >= s.epoch;
}

void Exchange::collect(std::uint32_t channel, std::byte* out) {
  const ChannelState& s = state(channel);
  if (s.epoch == 0 || !ipc::reached(&work_.channel(channel)->done, s.epoch)) {
    throw NativeError("collect of a job that is not done");
  }
  for (const wire::WorkRow& row : s.rows) {
    collector_.collect(channel, s.epoch, row, out);
    out += layout_.q_row_bytes;
  }
}

void Exchange::end_plan() {
  if (!in_plan_) throw NativeError("end_plan without begin_plan");
  bool had_rows = rides_.busy(plan_);
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    had_rows = had_rows || !channels_[c].rows.empty();
    if (channels_[c].epoch != 0 && !ipc::reached(&work_.channel(c)->done, channels_[c].epoch)) {
      abort(c);
    }
    channels_[c].rows.clear();
    channels_[c].epoch = 0;
  }
  retire_desc(plan_);
  rides_.end(plan_);
  leave(had_rows, false);
  in_plan_ = false;
}

// The plan is over: workers need not spin for it. Jobs of riders go on; whoever went to sleep
// between a device's publish and this finds them after the ring.
void Exchange::leave(bool had_rows, bool device) {
  if (!had_rows) return;
  if (device) ipc::sub(&control_->server()->device_plans, 1u);
  ipc::sub(&control_->server()->active, 1u);
  if (device && rides_.pending()) {
    ipc::ring(work_.bell(), ipc::load_relaxed(&work_.bell()->value) + 1);
  }
}

Announced Exchange::announce(std::uint64_t plan_id, const ChannelRows& rows,
                             const std::vector<Move>& moves) {
  const auto slot = static_cast<std::uint32_t>(plan_id % geometry_.n_plans);
  const wire::WorkDesc* desc = work_.desc(slot);
  if (desc->first_epoch[0] != 0 || desc->first_epoch[1] != 0 || rides_.busy(slot)) {
    throw NativeError("plan " + std::to_string(plan_id) + " is announced before plan " +
                      std::to_string(desc->plan_id) + " is retired");
  }
  const bool has_rows = prepare(plan_id, rows, moves);
  Announced announced{};
  announced.moves = moves_;
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    announced.first_epoch[c] = channels_[c].first_epoch;
    announced.n_tasks[c] = channels_[c].n_tasks;
    announced.rows[c].swap(channels_[c].rows);
  }
  if (!has_rows) return announced;
  ipc::add(&control_->server()->active, 1u);
  ipc::add(&control_->server()->device_plans, 1u);
  ipc::ring(work_.bell(), ipc::load_relaxed(&work_.bell()->value) + 1);
  return announced;
}

void Exchange::abort_through(std::uint32_t channel, std::uint64_t epoch) {
  state(channel);  // bounds
  ipc::max_store(&work_.channel(channel)->abort, epoch);
}

std::uint64_t Exchange::done_epoch(std::uint32_t channel) const {
  state(channel);  // bounds
  return ipc::load_acquire(&work_.channel(channel)->done.value);
}

void Exchange::retire(std::uint64_t plan_id) {
  const auto plan = static_cast<std::uint32_t>(plan_id % geometry_.n_plans);
  const wire::WorkDesc* desc = work_.desc(plan);
  if (desc->plan_id != plan_id) throw NativeError("retire of a plan that was not announced");
  bool had_rows = rides_.busy(plan);
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    if (desc->first_epoch[c] == 0) continue;
    had_rows = true;
    const std::uint64_t last = desc->first_epoch[c] + desc->n_layers - 1;
    if (!ipc::reached(&work_.channel(c)->done, last)) abort_through(c, last);
  }
  retire_desc(plan);
  rides_.end(plan);
  leave(had_rows, true);
}

}  // namespace neo::offload
