#include "offload/exchange.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ipc/doorbell.hpp"
#include "ipc/errors.hpp"
#include "layout/elements.hpp"
#include "layout/splits.hpp"
#include "layout/task_word.hpp"
#include "offload/merge.hpp"

namespace neo::offload {

Exchange::Exchange(std::shared_ptr<layout::Control> control, std::shared_ptr<ipc::Segment> work,
                   std::shared_ptr<ipc::Segment> exchange, const wire::Geometry& geometry)
    : control_(std::move(control)),
      exchange_(std::move(exchange)),
      geometry_(geometry),
      work_(std::move(work), geometry),
      layout_(geometry),
      merged_(std::size_t{layout::group_size(geometry)} * geometry.head_dim) {
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

void Exchange::check_rows(const DecodeRows& rows) const {
  const std::uint64_t capacity = std::uint64_t{geometry_.max_pages} * geometry_.page_size;
  for (std::size_t i = 0; i < rows.n; ++i) {
    if (rows.slots[i] >= geometry_.max_slots) {
      throw std::out_of_range("slot is " + std::to_string(rows.slots[i]) +
                              "; it must be below max_slots, " +
                              std::to_string(geometry_.max_slots));
    }
    if (rows.seq_lens[i] == 0 || rows.seq_lens[i] > capacity) {
      throw std::out_of_range("seq_len is " + std::to_string(rows.seq_lens[i]) +
                              "; it must be from 1 to max_pages * page_size, " +
                              std::to_string(capacity));
    }
  }
}

void Exchange::prepare_channel(std::uint32_t channel, const DecodeRows& rows) {
  ChannelState& s = channels_[channel];
  const auto splits =
      layout::choose_splits(geometry_, rows.seq_lens, rows.n, control_->ready_threads());
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
bool Exchange::prepare(std::uint64_t plan_id, const std::array<DecodeRows, wire::kChannels>& rows) {
  if (in_plan_) throw NativeError("a plan begins before end_plan of the plan in flight");
  if (rows[0].n + rows[1].n > geometry_.max_rows) {
    throw std::invalid_argument("the plan has " + std::to_string(rows[0].n + rows[1].n) +
                                " rows; max_rows is " + std::to_string(geometry_.max_rows));
  }
  for (const DecodeRows& r : rows) check_rows(r);
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) prepare_channel(c, rows[c]);
  plan_ = static_cast<std::uint32_t>(plan_id % geometry_.n_plans);
  write_desc(plan_id);
  return rows[0].n + rows[1].n != 0;
}

void Exchange::begin_plan(std::uint64_t plan_id,
                          const std::array<DecodeRows, wire::kChannels>& rows) {
  const bool has_rows = prepare(plan_id, rows);
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

void Exchange::collect_head(std::uint32_t channel, const wire::WorkRow& row, std::uint32_t kv_head,
                            std::byte* out) {
  const std::uint32_t group = layout::group_size(geometry_);
  std::vector<Partial> partials;
  for (std::uint32_t split = 0; split < row.n_splits; ++split) {
    const std::uint32_t task = row.first_task + kv_head * row.n_splits + split;
    const auto word = layout::unpack(ipc::load_acquire(work_.task(channel, task)));
    if (word.epoch != channels_[channel].epoch || word.state != wire::TaskState::finished ||
        word.worker >= geometry_.max_workers) {
      throw NativeError("task " + std::to_string(task) + " of a job that is done has epoch " +
                        std::to_string(word.epoch) + " and state " +
                        std::to_string(static_cast<std::uint32_t>(word.state)));
    }
    const std::byte* area = exchange_->data() + layout_.area(geometry_, word.worker, channel, task);
    partials.push_back(Partial::at(area, group, geometry_.head_dim));
  }
  merge(partials, group, geometry_.head_dim, merged_.data());
  layout::from_floats(merged_.data(), out, static_cast<wire::DType>(geometry_.act_dtype),
                      merged_.size());
}

void Exchange::collect(std::uint32_t channel, std::byte* out) {
  const ChannelState& s = state(channel);
  if (s.epoch == 0 || !ipc::reached(&work_.channel(channel)->done, s.epoch)) {
    throw NativeError("collect of a job that is not done");
  }
  const std::size_t head_bytes = merged_.size() * layout::element_size(geometry_.act_dtype);
  for (const wire::WorkRow& row : s.rows) {
    for (std::uint32_t kv_head = 0; kv_head < geometry_.n_kv_heads; ++kv_head) {
      collect_head(channel, row, kv_head, out);
      out += head_bytes;
    }
  }
}

void Exchange::end_plan() {
  if (!in_plan_) throw NativeError("end_plan without begin_plan");
  bool had_rows = false;
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    had_rows = had_rows || !channels_[c].rows.empty();
    if (channels_[c].epoch != 0 && !ipc::reached(&work_.channel(c)->done, channels_[c].epoch)) {
      abort(c);
    }
    channels_[c].rows.clear();
    channels_[c].epoch = 0;
  }
  retire_desc(plan_);
  if (had_rows) ipc::sub(&control_->server()->active, 1u);
  in_plan_ = false;
}

Announced Exchange::announce(std::uint64_t plan_id,
                             const std::array<DecodeRows, wire::kChannels>& rows) {
  const wire::WorkDesc* desc = work_.desc(static_cast<std::uint32_t>(plan_id % geometry_.n_plans));
  if (desc->first_epoch[0] != 0 || desc->first_epoch[1] != 0) {
    throw NativeError("plan " + std::to_string(plan_id) + " is announced before plan " +
                      std::to_string(desc->plan_id) + " is retired");
  }
  const bool has_rows = prepare(plan_id, rows);
  Announced announced{};
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
  bool had_rows = false;
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    if (desc->first_epoch[c] == 0) continue;
    had_rows = true;
    const std::uint64_t last = desc->first_epoch[c] + desc->n_layers - 1;
    if (!ipc::reached(&work_.channel(c)->done, last)) abort_through(c, last);
  }
  retire_desc(plan);
  if (!had_rows) return;
  ipc::sub(&control_->server()->device_plans, 1u);
  ipc::sub(&control_->server()->active, 1u);
}

}  // namespace neo::offload
