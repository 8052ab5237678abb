// The whole hot path of a cpu worker: threads that claim, attend, finish.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attn_worker/worker_thread.hpp"

namespace neo::attn_worker {

struct WorkerSegments {
  std::shared_ptr<layout::Control> control;
  std::shared_ptr<ipc::Segment> work;
  std::shared_ptr<ipc::Segment> exchange;
  std::shared_ptr<ipc::Segment> cpu_cache;
  std::shared_ptr<ipc::Segment> sequences;
};

struct WorkerOptions {
  std::uint32_t row;
  std::uint32_t n_threads;
  std::vector<int> cores;  // thread i is pinned to cores[i]; empty: unpinned
  std::string fault;       // see fault.hpp
};

class AttentionWorker {
 public:
  // Gives the row's output areas their memory; throws SharedMemoryError when there is none.
  AttentionWorker(const WorkerSegments& segments, const WorkerOptions& options);
  ~AttentionWorker();
  AttentionWorker(const AttentionWorker&) = delete;
  AttentionWorker& operator=(const AttentionWorker&) = delete;

  // Before start: every thread takes a lane of the timeline segment, which outlives the threads.
  void record(std::byte* timeline, std::uint64_t bytes);
  // Starts the threads, then says so in the worker row: state ready. Once only.
  void start();
  // Finishes claimed tasks, wakes and joins the threads, publishes the counters and
  // leaves the row draining; clear_row empties it. A second call does nothing.
  void stop();
  void heartbeat();

 private:
  void pin(std::size_t index);

  WorkerSegments segments_;
  WorkerOptions options_;
  layout::Work work_;
  offload::CpuCache cache_;
  Shared shared_;
  std::vector<std::unique_ptr<WorkerThread>> workers_;
  std::vector<std::thread> threads_;
};

}  // namespace neo::attn_worker
