// The work segment: descriptors, task words, doorbells. And how a job is read from it safely.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "ipc/atomics.hpp"
#include "ipc/shm_segment.hpp"
#include "layout/segment_layout.hpp"
#include "protos/wire.hpp"

namespace neo::layout {

// What a cpu worker knows of one job: one channel at one layer. Groups of riders have channels of
// their own, after those of the sub-batches.
struct Job {
  std::uint64_t epoch;
  std::uint32_t channel;
  std::uint32_t desc;  // descriptor slot
  std::uint32_t layer;
  std::uint32_t n_rows;
  std::uint32_t n_tasks;
};

class Work {
 public:
  Work(std::shared_ptr<ipc::Segment> segment, const wire::Geometry& geometry)
      : segment_(std::move(segment)), geometry_(geometry), layout_(geometry) {
    check_segment(*segment_, wire::SegmentKind::work, geometry);
  }

  wire::Doorbell* bell() const { return at<wire::Doorbell>(layout_.bell); }
  wire::Channel* channel(std::uint32_t c) const { return at<wire::Channel>(layout_.channels) + c; }
  wire::WorkDesc* desc(std::uint32_t plan) const {
    return at<wire::WorkDesc>(layout_.descs) + plan;
  }
  wire::WorkRow* rows(std::uint32_t plan, std::uint32_t c) const {
    return at<wire::WorkRow>(layout_.rows) +
           (std::uint64_t{plan} * wire::kChannels + c) * geometry_.max_rows;
  }
  std::uint64_t* task(std::uint32_t c, std::uint32_t index) const {
    return at<std::uint64_t>(layout_.tasks) + first_task(geometry_, c) + index;
  }

  wire::RideQueue* ride_queue() const { return at<wire::RideQueue>(layout_.ride_queue); }
  wire::Doorbell* ride_done(std::uint32_t group) const {
    return at<wire::Doorbell>(layout_.ride_done) + group;
  }
  wire::RideDesc* ride_desc(std::uint32_t slot) const {
    return at<wire::RideDesc>(layout_.ride_descs) + slot;
  }
  wire::WorkRow* ride_rows(std::uint32_t slot) const {
    return at<wire::WorkRow>(layout_.ride_rows) + std::uint64_t{slot} * geometry_.ride_capacity;
  }
  // Rows of either kind of job.
  const wire::WorkRow* rows_of(const Job& job) const {
    return is_ride(job) ? ride_rows(job.desc) : rows(job.desc, job.channel);
  }
  static bool is_ride(const Job& job) { return job.channel >= wire::kChannels; }

  // The rider job of this number, if it is still there and whole; as find_job.
  std::optional<Job> find_ride(std::uint64_t number) const {
    const auto slot = static_cast<std::uint32_t>(number % n_ride_descs(geometry_));
    const wire::RideDesc* d = ride_desc(slot);
    if (ipc::load_acquire(&d->job) != number) return std::nullopt;
    const std::uint32_t group = ipc::load_relaxed(&d->group);
    const Job job{number,
                  ride_channel(group),
                  slot,
                  ipc::load_relaxed(&d->layer),
                  ipc::load_relaxed(&d->n_rows),
                  ipc::load_relaxed(&d->n_tasks)};
    ipc::acquire_fence();
    if (ipc::load_relaxed(&d->job) != number) return std::nullopt;
    if (group >= geometry_.ride_groups || job.layer >= geometry_.n_layers) return std::nullopt;
    if (job.n_rows > geometry_.ride_capacity || job.n_tasks > ride_tasks(geometry_)) {
      return std::nullopt;
    }
    return job;
  }

  // The descriptor of the job published as `epoch`, if it is still there and whole. The writer
  // takes first_epoch away before it touches the rest and never uses an epoch twice, so reading the
  // same first_epoch before and after means that what lies between belongs to it.
  std::optional<Job> find_job(std::uint32_t c, std::uint64_t epoch) const {
    for (std::uint32_t plan = 0; plan < geometry_.n_plans; ++plan) {
      const wire::WorkDesc* d = desc(plan);
      const std::uint64_t first = ipc::load_acquire(&d->first_epoch[c]);
      if (first == 0 || epoch < first) continue;
      const std::uint64_t layer = epoch - first;
      const Job job{epoch,
                    c,
                    plan,
                    static_cast<std::uint32_t>(layer),
                    ipc::load_relaxed(&d->n_rows[c]),
                    ipc::load_relaxed(&d->n_tasks[c])};
      const std::uint32_t n_layers = ipc::load_relaxed(&d->n_layers);
      ipc::acquire_fence();
      if (ipc::load_relaxed(&d->first_epoch[c]) != first || layer >= n_layers) continue;
      if (job.n_rows > geometry_.max_rows || job.n_tasks > geometry_.max_tasks) continue;
      return job;
    }
    return std::nullopt;
  }

 private:
  template <typename T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(segment_->data() + offset);
  }

  std::shared_ptr<ipc::Segment> segment_;
  wire::Geometry geometry_;
  WorkLayout layout_;
};

}  // namespace neo::layout
