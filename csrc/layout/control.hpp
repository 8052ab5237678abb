// The control segment: geometry, server row, worker table, core leases.
#pragma once

#include <cstdint>
#include <memory>

#include "ipc/shm_segment.hpp"
#include "layout/segment_layout.hpp"
#include "protos/wire.hpp"

namespace neo::layout {

class Control {
 public:
  explicit Control(std::shared_ptr<ipc::Segment> segment);

  const wire::Geometry& geometry() const { return geometry_; }
  wire::ServerRow* server() const { return at<wire::ServerRow>(layout_.server); }
  // Throws std::out_of_range.
  wire::WorkerRow* worker(std::uint32_t row) const;

  void set_server_pid(std::int32_t pid) { server()->pid = pid; }
  void set_stopping();
  bool stopping() const;
  // The gpu worker is gone, with every plan in flight: cpu workers need not spin for one.
  void clear_plans();
  void request_drain(std::uint32_t row);
  bool draining(std::uint32_t row) const;

  // A worker's own row, once it holds the row's lock: wipes what a predecessor left there.
  void take_row(std::uint32_t row, std::int32_t pid, std::uint32_t n_threads, bool spawned);
  void set_state(std::uint32_t row, wire::WorkerState state);
  // Empties the row and frees its core leases.
  void clear_row(std::uint32_t row);

  std::uint32_t ready_workers() const;
  std::uint32_t ready_threads() const;

  // True: the core is now leased to this worker row.
  bool lease_core(std::uint32_t core, std::uint32_t row);
  void release_cores(std::uint32_t row);

 private:
  template <typename T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(segment_->data() + offset);
  }

  std::shared_ptr<ipc::Segment> segment_;
  wire::Geometry geometry_;
  ControlLayout layout_;
};

}  // namespace neo::layout
