#include "layout/control.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "ipc/atomics.hpp"
#include "ipc/clock.hpp"
#include "ipc/errors.hpp"

namespace neo::layout {
namespace {

wire::Geometry read_geometry(const ipc::Segment& segment) {
  if (segment.size() < ControlLayout(0).size) {
    throw LayoutMismatchError("control segment has " + std::to_string(segment.size()) +
                              " bytes, the smallest has " + std::to_string(ControlLayout(0).size));
  }
  wire::Geometry geometry;
  std::memcpy(&geometry, segment.data() + ControlLayout(0).geometry, sizeof(geometry));
  validate_geometry(geometry);
  check_segment(segment, wire::SegmentKind::control, geometry);
  return geometry;
}

}  // namespace

Control::Control(std::shared_ptr<ipc::Segment> segment)
    : segment_(std::move(segment)),
      geometry_(read_geometry(*segment_)),
      layout_(geometry_.max_workers) {}

wire::WorkerRow* Control::worker(std::uint32_t row) const {
  if (row >= geometry_.max_workers) {
    throw std::out_of_range("worker row is " + std::to_string(row) + "; max_workers is " +
                            std::to_string(geometry_.max_workers));
  }
  return at<wire::WorkerRow>(layout_.workers) + row;
}

void Control::set_stopping() { ipc::store_release(&server()->stopping, 1u); }

bool Control::stopping() const { return ipc::load_acquire(&server()->stopping) != 0; }

void Control::clear_plans() {
  ipc::store_release(&server()->device_plans, 0u);
  ipc::store_release(&server()->active, 0u);
}

void Control::request_drain(std::uint32_t row) { ipc::store_release(&worker(row)->draining, 1u); }

bool Control::draining(std::uint32_t row) const {
  return ipc::load_acquire(&worker(row)->draining) != 0;
}

void Control::take_row(std::uint32_t row, std::int32_t pid, std::uint32_t n_threads, bool spawned) {
  clear_row(row);
  wire::WorkerRow* mine = worker(row);
  mine->pid = pid;
  mine->rank = geometry_.rank;
  mine->spawned = spawned ? 1 : 0;
  ipc::store_relaxed(&mine->n_threads, n_threads);
  ipc::store_relaxed(&mine->heartbeat_ns, ipc::now_ns());
  ipc::store_release(&mine->state, static_cast<std::uint32_t>(wire::WorkerState::starting));
}

void Control::set_state(std::uint32_t row, wire::WorkerState state) {
  ipc::store_release(&worker(row)->state, static_cast<std::uint32_t>(state));
}

void Control::clear_row(std::uint32_t row) {
  wire::WorkerRow* dead = worker(row);
  ipc::store_release(&dead->state, static_cast<std::uint32_t>(wire::WorkerState::empty));
  release_cores(row);
  dead->pid = 0;
  dead->spawned = 0;
  ipc::store_relaxed(&dead->n_threads, 0u);
  for (std::uint64_t* counter : {&dead->heartbeat_ns, &dead->busy_ns, &dead->tasks, &dead->kv_bytes,
                                 &dead->stolen, &dead->lost}) {
    ipc::store_relaxed(counter, std::uint64_t{0});
  }
  ipc::store_release(&dead->draining, 0u);
}

namespace {

bool is_ready(const wire::WorkerRow* row) {
  return ipc::load_acquire(&row->state) == static_cast<std::uint32_t>(wire::WorkerState::ready);
}

}  // namespace

std::uint32_t Control::ready_workers() const {
  std::uint32_t count = 0;
  for (std::uint32_t row = 0; row < geometry_.max_workers; ++row) count += is_ready(worker(row));
  return count;
}

std::uint32_t Control::ready_threads() const {
  std::uint32_t threads = 0;
  for (std::uint32_t row = 0; row < geometry_.max_workers; ++row) {
    if (is_ready(worker(row))) threads += ipc::load_relaxed(&worker(row)->n_threads);
  }
  return threads;
}

bool Control::lease_core(std::uint32_t core, std::uint32_t row) {
  worker(row);  // bounds
  if (core >= wire::kMaxCores) return false;
  std::uint32_t free = 0;
  return ipc::cas(at<std::uint32_t>(layout_.core_leases) + core, free, row + 1);
}

void Control::release_cores(std::uint32_t row) {
  auto* leases = at<std::uint32_t>(layout_.core_leases);
  for (std::uint32_t core = 0; core < wire::kMaxCores; ++core) {
    std::uint32_t mine = row + 1;
    ipc::cas(leases + core, mine, 0u);
  }
}

}  // namespace neo::layout
