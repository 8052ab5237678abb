#include "offload/rides.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "ipc/doorbell.hpp"
#include "ipc/errors.hpp"
#include "layout/splits.hpp"

namespace neo::offload {

Rides::Rides(std::shared_ptr<layout::Control> control, layout::Work work,
             std::shared_ptr<ipc::Segment> exchange, const wire::Geometry& geometry)
    : control_(std::move(control)),
      work_(work),
      exchange_(exchange),
      geometry_(geometry),
      layout_(geometry),
      collector_(work, exchange, geometry),
      groups_(geometry.ride_groups),
      plans_(geometry.n_plans),
      current_(geometry.ride_groups) {
  for (Group& group : groups_) group.rows.resize(geometry_.ride_capacity);
  std::uint64_t last = ipc::load_acquire(&work_.ride_queue()->published);
  for (std::uint32_t i = 0; i < layout::n_ride_descs(geometry_); ++i) {
    last = std::max(last, ipc::load_acquire(&work_.ride_desc(i)->job));
  }
  abort_through(last);
  for (std::uint32_t i = 0; i < layout::n_ride_descs(geometry_); ++i) {
    ipc::store_release(&work_.ride_desc(i)->job, std::uint64_t{0});
  }
  next_job_ = last + 1;
}

void Rides::check_rows(const Move& move) const {
  const bool is_new = move.stage == 0;
  const Group& group = groups_[move.group];
  for (std::size_t i = 0; i < move.rows.n; ++i) {
    const std::uint32_t place = move.places[i];
    if (place >= geometry_.ride_capacity || (i != 0 && place <= move.places[i - 1])) {
      throw std::invalid_argument("place is " + std::to_string(place) +
                                  "; places must grow and be below ride_capacity, " +
                                  std::to_string(geometry_.ride_capacity));
    }
    const wire::WorkRow& before = group.rows[place];
    const bool same = before.n_splits != 0 && before.slot == move.rows.slots[i] &&
                      before.seq_len == move.rows.seq_lens[i];
    if (!is_new && !same) {
      throw std::invalid_argument(
          "slot " + std::to_string(move.rows.slots[i]) + " at place " + std::to_string(place) +
          " of group " + std::to_string(move.group) + " was not there in the group's last plan");
    }
  }
  offload::check_rows(geometry_, move.rows);
}

void Rides::check_move(const Move& move) const {
  if (move.group >= geometry_.ride_groups || move.rows.n == 0) {
    throw std::invalid_argument("group is " + std::to_string(move.group) + " with " +
                                std::to_string(move.rows.n) + " riders; there are " +
                                std::to_string(geometry_.ride_groups) + " groups");
  }
  const Group& group = groups_[move.group];
  const bool follows = group.job != 0 && move.stage == group.stage + 1;
  if (move.stage != 0 && !follows) {
    throw std::invalid_argument("stage of group " + std::to_string(move.group) + " is " +
                                std::to_string(move.stage) + "; it must be 0" +
                                (group.job != 0 ? " or " + std::to_string(group.stage + 1) : ""));
  }
  check_rows(move);
}

void Rides::check(const std::vector<Move>& moves) const {
  std::vector<bool> named(geometry_.ride_groups);
  for (std::size_t i = 0; i < moves.size(); ++i) {
    check_move(moves[i]);
    if (named[moves[i].group] || (i != 0 && moves[i].stage <= moves[i - 1].stage)) {
      throw std::invalid_argument("stages must grow and no group be named twice");
    }
    named[moves[i].group] = true;
  }
}

// Writes the job's rows by place; returns its tasks.
std::uint32_t Rides::cut(Group& group, const Move& move) const {
  const auto splits =
      layout::choose_splits(geometry_, move.rows.seq_lens, move.rows.n, control_->ready_threads(),
                            layout::ride_tasks(geometry_));
  std::fill(group.rows.begin(), group.rows.end(), wire::WorkRow{});
  for (std::size_t i = 0; i < move.rows.n; ++i) {
    wire::WorkRow& row = group.rows[move.places[i]];
    row.slot = move.rows.slots[i];
    row.seq_len = move.rows.seq_lens[i];
    row.n_splits = splits[i];
  }
  std::uint32_t tasks = 0;
  for (wire::WorkRow& row : group.rows) {  // an absent place has no tasks of its own
    row.first_task = tasks;
    tasks += row.n_splits * geometry_.n_kv_heads;
  }
  return tasks;
}

bool Rides::over(const wire::RideDesc* desc, std::uint64_t job) const {
  return ipc::load_acquire(&work_.ride_queue()->abort) >= job ||
         ipc::reached(work_.ride_done(desc->group), job);
}

void Rides::write_desc(std::uint64_t job, const Move& move, const Group& group,
                       std::uint32_t n_tasks) {
  const auto at = static_cast<std::uint32_t>(job % layout::n_ride_descs(geometry_));
  wire::RideDesc* desc = work_.ride_desc(at);
  // A job as old as this belongs to a group that has stood still while all others went round.
  if (desc->job != 0 && !over(desc, desc->job)) abort_through(desc->job);
  ipc::store_relaxed(&desc->job, std::uint64_t{0});
  ipc::release_fence();  // before what follows; pairs with find_ride's
  ipc::store_relaxed(&desc->group, move.group);
  ipc::store_relaxed(&desc->layer, move.stage);
  ipc::store_relaxed(&desc->n_rows, geometry_.ride_capacity);
  ipc::store_relaxed(&desc->n_tasks, n_tasks);
  wire::WorkRow* rows = work_.ride_rows(at);
  for (std::size_t i = 0; i < group.rows.size(); ++i) {
    ipc::store_relaxed(&rows[i].slot, group.rows[i].slot);
    ipc::store_relaxed(&rows[i].seq_len, group.rows[i].seq_len);
    ipc::store_relaxed(&rows[i].first_task, group.rows[i].first_task);
    ipc::store_relaxed(&rows[i].n_splits, group.rows[i].n_splits);
  }
  ipc::store_release(&desc->job, job);
}

void Rides::retire(std::uint64_t job) {
  wire::RideDesc* desc =
      work_.ride_desc(static_cast<std::uint32_t>(job % layout::n_ride_descs(geometry_)));
  if (ipc::load_relaxed(&desc->job) != job) return;  // long rewritten
  ipc::store_release(&desc->job, std::uint64_t{0});
}

AnnouncedMove Rides::begin_move(Plan& plan, const Move& move) {
  Group& group = groups_[move.group];
  AnnouncedMove made{};
  if (move.stage == 0) {
    if (group.job != 0) retire(group.job);  // nobody will ask for it
  } else {
    made.collects = group.job;
    plan.collects.push_back(group.job);
    for (std::size_t i = 0; i < move.rows.n; ++i) {
      made.collected.push_back(group.rows[move.places[i]]);
    }
  }
  group.stage = move.stage;
  group.job = 0;
  if (move.stage == geometry_.n_layers) return made;
  made.n_tasks = cut(group, move);
  made.publishes = group.job = next_job_++;
  write_desc(group.job, move, group, made.n_tasks);
  return made;
}

std::vector<AnnouncedMove> Rides::begin(std::uint32_t plan, const std::vector<Move>& moves) {
  for (Current& current : current_) current.places.clear();
  plans_[plan].moves = !moves.empty();
  plans_[plan].collects.clear();
  std::vector<AnnouncedMove> made;
  for (const Move& move : moves) {
    made.push_back(begin_move(plans_[plan], move));
    Current& current = current_[move.group];
    current.stage = move.stage;
    current.places.assign(move.places, move.places + move.rows.n);
    current.announced = made.back();
  }
  return made;
}

void Rides::end(std::uint32_t plan) {
  for (const std::uint64_t job : plans_[plan].collects) retire(job);
  plans_[plan].collects.clear();
  plans_[plan].moves = false;
}

const Rides::Current& Rides::move(std::uint32_t group) const {
  if (group >= current_.size() || current_[group].places.empty()) {
    throw NativeError("group " + std::to_string(group) + " has no riders in the plan begun last");
  }
  return current_[group];
}

void Rides::publish(std::uint32_t group, const std::byte* q) {
  const Current& m = move(group);
  const std::uint64_t job = m.announced.publishes;
  wire::RideQueue* queue = work_.ride_queue();
  if (job <= ipc::load_relaxed(&queue->published)) {
    throw NativeError("group " + std::to_string(group) + " publishes twice, out of order, or at " +
                      "the last stage");
  }
  for (std::size_t i = 0; i < m.places.size(); ++i) {
    const std::uint64_t at = layout_.q_row(geometry_, layout::ride_channel(group), m.places[i]);
    std::memcpy(exchange_->data() + at, q + i * layout_.q_row_bytes, layout_.q_row_bytes);
  }
  // Release: Q, K and V before the number; pairs with the workers' acquire load of it.
  ipc::store_release(&queue->published, job);
  ipc::ring(work_.bell(), ipc::load_relaxed(&work_.bell()->value) + 1);
}

bool Rides::wait(std::uint32_t group, std::uint64_t timeout_ns) {
  const std::uint64_t job = move(group).announced.collects;
  if (job == 0) throw NativeError("wait without a published job");
  wire::Doorbell* done = work_.ride_done(group);
  if (given_up(group)) return ipc::reached(done, job);
  return ipc::wait(done, job, timeout_ns, geometry_.spin_us);
}

bool Rides::given_up(std::uint32_t group) const {
  return ipc::load_acquire(&work_.ride_queue()->abort) >= move(group).announced.collects;
}

void Rides::collect(std::uint32_t group, std::byte* out) {
  const AnnouncedMove& m = move(group).announced;
  if (m.collects == 0 || !ipc::reached(work_.ride_done(group), m.collects)) {
    throw NativeError("collect of a job that is not done");
  }
  for (std::size_t i = 0; i < m.collected.size(); ++i) {
    collector_.collect(layout::ride_channel(group), m.collects, m.collected[i],
                       out + i * layout_.q_row_bytes);
  }
}

void Rides::abort_through(std::uint64_t job) { ipc::max_store(&work_.ride_queue()->abort, job); }

void Rides::give_up() { abort_through(ipc::load_acquire(&work_.ride_queue()->published)); }

bool Rides::pending() const {
  const std::uint64_t published = ipc::load_acquire(&work_.ride_queue()->published);
  const std::uint64_t abort = ipc::load_acquire(&work_.ride_queue()->abort);
  for (std::uint32_t g = 0; g < geometry_.ride_groups; ++g) {
    const std::uint64_t job = groups_[g].job;
    if (job > abort && job <= published && !ipc::reached(work_.ride_done(g), job)) return true;
  }
  return false;
}

std::uint64_t Rides::progress() const {
  std::uint64_t sum = 0;
  for (std::uint32_t g = 0; g < geometry_.ride_groups; ++g) {
    sum += ipc::load_acquire(&work_.ride_done(g)->value);
  }
  return sum;
}

}  // namespace neo::offload
