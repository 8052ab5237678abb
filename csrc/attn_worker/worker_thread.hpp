// One attention thread: claim, attend, finish.
//
// A task word goes through
//
//   {older epoch} ──claim──▶ {e, claimed, me} ──finish──▶ {e, finished, me}
//                                 │    ▲
//                                 └────┘ claim by another, when this very word was seen unchanged
//                                        for the length of a lease
//
// all by compare-and-swap. Whoever has a whole result may finish a task that is claimed, by itself
// or by a thief: the first to finish wins and the others have lost, harmlessly, because a result
// lies in its maker's own area and only the finished word says whose is read. (Were a thief's claim
// final, tasks that take longer than a lease would be stolen for ever and never finished.)
//
// What is read from shared memory may be stale at any moment: this process may have been stopped
// for an hour. Every index is checked before use, nothing but the own area and the words is
// written, and a word of a later epoch ends the job.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "attn_worker/fault.hpp"
#include "attn_worker/siblings.hpp"
#include "attn_worker/task_runner.hpp"
#include "attn_worker/timeline_lane.hpp"
#include "layout/control.hpp"
#include "layout/work.hpp"

namespace neo::attn_worker {

// What the threads of one process share.
struct Shared {
  layout::Control& control;
  layout::Work& work;
  ipc::Segment& exchange;
  const offload::CpuCache& cache;
  std::uint32_t row;
  attn::Kernel kernel;
  Siblings siblings;
  Fault fault;
  std::atomic<bool> stop{false};
};

struct alignas(64) Counters {
  std::atomic<std::uint64_t> busy_ns{0}, tasks{0}, kv_bytes{0}, stolen{0}, lost{0};
};

class WorkerThread {
 public:
  WorkerThread(Shared& shared, std::uint32_t index);

  // Until shared.stop; finishes the task it is in.
  void run();

  const Counters& counters() const { return counters_; }

  // Before run.
  void record_on(const TimelineLane& lane) { lane_ = lane; }

 private:
  // When a claimed word was first seen as it is now, by this thread's clock.
  struct Seen {
    std::uint64_t word = 0;
    std::uint64_t since_ns = 0;
  };
  // This thread's progress through a channel's current job (a group of riders is a channel).
  struct Progress {
    layout::Job job{};
    std::vector<std::uint32_t> open;  // tasks not seen finished
    std::vector<Seen> seen;           // [tasks of the channel]
  };
  // What a task index stands for, and whose query it needs.
  struct Place {
    Task task;
    std::uint32_t row;
  };
  enum class Outcome { idle, waiting, worked };
  enum class Claim { refused, contended, taken };

  Outcome serve(std::uint32_t channel);
  Outcome serve_riders();
  bool channel_is_due() const;
  void open_job(const layout::Job& job);
  Outcome pass(Progress& progress);
  void drop_finished(Progress& progress) const;
  Claim try_claim(Progress& progress, std::uint32_t task, std::uint64_t word);
  bool lease_over(Seen& seen, std::uint64_t word) const;
  void work_on(const layout::Job& job, std::uint32_t task, std::uint32_t next);
  std::uint64_t compute(const layout::Job& job, std::uint32_t task, std::uint32_t next);
  std::optional<Place> find(const layout::Job& job, std::uint32_t task) const;
  void note(const layout::Job& job, std::uint32_t task, wire::Span span);
  void finish(const layout::Job& job, std::uint32_t task);
  bool over(const layout::Job& job) const;
  wire::Doorbell* done(const layout::Job& job) const;
  std::uint64_t my_word(std::uint64_t epoch, wire::TaskState state) const;
  void rest(bool waiting, std::uint64_t bell, std::uint64_t idle_since_ns);

  Shared& shared_;
  const wire::Geometry geometry_;
  const layout::ExchangeLayout layout_;
  const std::uint32_t index_;
  TaskRunner runner_;
  std::vector<Progress> progress_;  // [n_channels]
  std::uint64_t oldest_ride_ = 1;   // rider jobs before it are over
  Counters counters_;
  TimelineLane lane_;
};

}  // namespace neo::attn_worker
