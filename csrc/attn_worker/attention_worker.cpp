#include "attn_worker/attention_worker.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "ipc/clock.hpp"
#include "ipc/doorbell.hpp"
#include "ipc/errors.hpp"

namespace neo::attn_worker {
namespace {

const WorkerOptions& check(const WorkerOptions& options) {
  constexpr std::uint32_t kMost = wire::kTaskFieldMask + 1;
  if (options.n_threads == 0 || options.n_threads > kMost) {
    throw std::invalid_argument("n_threads is " + std::to_string(options.n_threads) +
                                "; it must be from 1 to " + std::to_string(kMost));
  }
  if (!options.cores.empty() && options.cores.size() != options.n_threads) {
    throw std::invalid_argument("cores has " + std::to_string(options.cores.size()) +
                                " entries; it must be empty or have n_threads, " +
                                std::to_string(options.n_threads));
  }
  return options;
}

}  // namespace

AttentionWorker::AttentionWorker(const WorkerSegments& segments, const WorkerOptions& options)
    : segments_(segments),
      options_(check(options)),
      work_(segments.work, segments.control->geometry()),
      cache_(segments.cpu_cache,
             std::make_shared<layout::Sequences>(segments.sequences, segments.control->geometry()),
             segments.control->geometry()),
      shared_{*segments_.control,
              work_,
              *segments_.exchange,
              cache_,
              options.row,
              attn::select_variant("auto").kernel,
              Siblings(options.n_threads),
              Fault(options.fault)} {
  const wire::Geometry& g = segments_.control->geometry();
  segments_.control->worker(options_.row);  // bounds
  layout::check_segment(*segments_.exchange, wire::SegmentKind::exchange, g);
  const layout::ExchangeLayout layout(g);
  segments_.exchange->populate(layout.area(g, options_.row, 0, 0), layout.worker_area_bytes,
                               options_.n_threads);
  for (std::uint32_t i = 0; i < options_.n_threads; ++i) {
    workers_.push_back(std::make_unique<WorkerThread>(shared_, i));
  }
}

AttentionWorker::~AttentionWorker() { stop(); }

void AttentionWorker::pin(std::size_t index) {
  if (options_.cores.empty()) return;
  const int core = options_.cores[index];
  if (core < 0 || core >= CPU_SETSIZE) {
    throw std::invalid_argument("core is " + std::to_string(core) + "; it must be from 0 to " +
                                std::to_string(CPU_SETSIZE - 1));
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  const int error = pthread_setaffinity_np(threads_[index].native_handle(), sizeof(set), &set);
  if (error != 0) {
    throw NativeError("pinning a thread to core " + std::to_string(core) + ": " +
                      std::strerror(error));
  }
}

void AttentionWorker::record(std::byte* timeline, std::uint64_t bytes) {
  for (std::uint32_t i = 0; i < workers_.size(); ++i) {
    workers_[i]->record_on(TimelineLane::take(timeline, bytes, getpid(), options_.row, i));
  }
}

void AttentionWorker::start() {
  if (!threads_.empty() || shared_.stop.load()) throw NativeError("start of a used worker");
  // Threads inherit the mask: signals are the main thread's, which runs the interpreter.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (auto& worker : workers_) threads_.emplace_back([&worker] { worker->run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  try {
    for (std::size_t i = 0; i < threads_.size(); ++i) pin(i);
  } catch (...) {
    stop();
    throw;
  }
  wire::WorkerRow* row = segments_.control->worker(options_.row);
  if (row->pid == 0) row->pid = getpid();
  ipc::store_relaxed(&row->n_threads, options_.n_threads);
  heartbeat();
  segments_.control->set_state(options_.row, wire::WorkerState::ready);
}

void AttentionWorker::stop() {
  shared_.stop.store(true, std::memory_order_seq_cst);
  if (threads_.empty()) return;
  segments_.control->set_state(options_.row, wire::WorkerState::draining);
  ipc::wake_all(work_.bell());
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  heartbeat();
}

void AttentionWorker::heartbeat() {
  std::uint64_t busy = 0, tasks = 0, bytes = 0, stolen = 0, lost = 0;
  for (const auto& worker : workers_) {
    const Counters& c = worker->counters();
    busy += c.busy_ns.load(std::memory_order_relaxed);
    tasks += c.tasks.load(std::memory_order_relaxed);
    bytes += c.kv_bytes.load(std::memory_order_relaxed);
    stolen += c.stolen.load(std::memory_order_relaxed);
    lost += c.lost.load(std::memory_order_relaxed);
  }
  wire::WorkerRow* row = segments_.control->worker(options_.row);
  ipc::store_relaxed(&row->busy_ns, busy);
  ipc::store_relaxed(&row->tasks, tasks);
  ipc::store_relaxed(&row->kv_bytes, bytes);
  ipc::store_relaxed(&row->stolen, stolen);
  ipc::store_relaxed(&row->lost, lost);
  ipc::store_relaxed(&row->heartbeat_ns, ipc::now_ns());
}

}  // namespace neo::attn_worker
