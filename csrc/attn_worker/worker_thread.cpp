#include "attn_worker/worker_thread.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ipc/clock.hpp"
#include "ipc/doorbell.hpp"
#include "layout/task_word.hpp"

namespace neo::attn_worker {

using wire::TaskState;

namespace {

// How long a thread sleeps at most before it looks for work by itself.
constexpr std::uint64_t kMaxSleepNs = 200'000'000;

void count(std::atomic<std::uint64_t>& counter, std::uint64_t amount) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace

WorkerThread::WorkerThread(Shared& shared, std::uint32_t index)
    : shared_(shared),
      geometry_(shared.control.geometry()),
      layout_(geometry_),
      index_(index),
      runner_(shared.cache, shared.kernel),
      progress_(layout::n_channels(geometry_)) {
  for (std::uint32_t c = 0; c < progress_.size(); ++c) {
    progress_[c].open.reserve(layout::max_tasks(geometry_, c));
    progress_[c].seen.resize(layout::max_tasks(geometry_, c));
  }
}

void WorkerThread::run() {
  std::uint64_t idle_since_ns = ipc::now_ns();
  while (!shared_.stop.load(std::memory_order_acquire)) {
    // Before the channels are looked at: a publish after this load changes the bell.
    const std::uint64_t bell = ipc::load_acquire(&shared_.work.bell()->value);
    Outcome best = Outcome::idle;
    for (std::uint32_t c = 0; c < wire::kChannels; ++c) best = std::max(best, serve(c));
    if (best != Outcome::worked) best = std::max(best, serve_riders());
    if (best == Outcome::worked) {
      idle_since_ns = ipc::now_ns();
    } else {
      rest(best == Outcome::waiting, bell, idle_since_ns);
    }
  }
}

// Spins while a plan with CPU-requests is in flight and the last work is recent, or while a device
// publishes, whose store wakes nobody; else sleeps. A
// thread that only waits for others' claims sleeps for a lease at most: then it may take one over.
void WorkerThread::rest(bool waiting, std::uint64_t bell, std::uint64_t idle_since_ns) {
  const bool active = waiting || ipc::load_acquire(&shared_.control.server()->active) != 0;
  const bool device = ipc::load_acquire(&shared_.control.server()->device_plans) != 0;
  if (device ||
      (active && ipc::now_ns() - idle_since_ns < std::uint64_t{geometry_.spin_us} * 1000)) {
    for (int i = 0; i < 32; ++i) ipc::spin_pause();
    return;
  }
  const std::uint64_t lease_ns = std::uint64_t{geometry_.lease_us} * 1000;
  const std::uint64_t timeout = waiting ? std::min(lease_ns, kMaxSleepNs) : kMaxSleepNs;
  ipc::wait_unless(shared_.work.bell(), bell + 1, timeout, 0,
                   [&] { return shared_.stop.load(std::memory_order_seq_cst); });
}

bool WorkerThread::over(const layout::Job& job) const {
  if (layout::Work::is_ride(job)) {
    // Also when its descriptor is gone: taken back, or nobody will ask for it.
    return ipc::load_acquire(&shared_.work.ride_queue()->abort) >= job.epoch ||
           ipc::reached(shared_.work.ride_done(job.channel - wire::kChannels), job.epoch) ||
           ipc::load_acquire(&shared_.work.ride_desc(job.desc)->job) != job.epoch;
  }
  const wire::Channel* channel = shared_.work.channel(job.channel);
  return ipc::load_acquire(&channel->abort) >= job.epoch ||
         ipc::load_acquire(&channel->done.value) >= job.epoch;
}

WorkerThread::Outcome WorkerThread::serve(std::uint32_t channel) {
  const std::uint64_t epoch =
      ipc::load_acquire(&shared_.work.channel(channel)->published.value);  // pairs with publish
  layout::Job probe{};
  probe.channel = channel;
  probe.epoch = epoch;
  if (over(probe)) return Outcome::idle;  // also when nothing was ever published: 0 >= 0
  if (progress_[channel].job.epoch != epoch) {
    const auto job = shared_.work.find_job(channel, epoch);
    if (!job) return Outcome::waiting;
    open_job(*job);
  }
  return pass(progress_[channel]);
}

// Jobs of riders, the oldest first: in the order in which they were published they are needed. One
// whose tasks are all claimed by others is left to them, and the next is looked at.
WorkerThread::Outcome WorkerThread::serve_riders() {
  const std::uint32_t n_descs = layout::n_ride_descs(geometry_);
  if (n_descs == 0) return Outcome::idle;
  const wire::RideQueue* queue = shared_.work.ride_queue();
  const std::uint64_t published = ipc::load_acquire(&queue->published);  // pairs with publish
  oldest_ride_ = std::max(oldest_ride_, ipc::load_acquire(&queue->abort) + 1);
  if (published >= n_descs) oldest_ride_ = std::max(oldest_ride_, published + 1 - n_descs);
  Outcome best = Outcome::idle;
  for (std::uint64_t number = oldest_ride_; number <= published; ++number) {
    const auto job = shared_.work.find_ride(number);
    if (!job || over(*job)) {
      if (number == oldest_ride_) ++oldest_ride_;
      continue;
    }
    if (progress_[job->channel].job.epoch != number) open_job(*job);
    best = std::max(best, pass(progress_[job->channel]));
    if (best == Outcome::worked) break;  // whatever is more urgent comes first again
  }
  return best;
}

// A sub-batch waits for its job now; riders have a whole iteration.
bool WorkerThread::channel_is_due() const {
  for (std::uint32_t c = 0; c < wire::kChannels; ++c) {
    layout::Job probe{};
    probe.channel = c;
    probe.epoch = ipc::load_acquire(&shared_.work.channel(c)->published.value);
    if (!over(probe)) return true;
  }
  return false;
}

void WorkerThread::open_job(const layout::Job& job) {
  Progress& progress = progress_[job.channel];
  progress.job = job;
  progress.open.resize(job.n_tasks);
  std::iota(progress.open.begin(), progress.open.end(), 0u);
  // Threads start at different tasks (golden-ratio steps spread any number of them evenly), so
  // that they meet only when little is left.
  const double ratio = 0.6180339887498949 * (shared_.row * 7 + index_);
  const auto start = static_cast<std::size_t>((ratio - std::floor(ratio)) * job.n_tasks);
  std::rotate(progress.open.begin(), progress.open.begin() + static_cast<std::ptrdiff_t>(start),
              progress.open.end());
}

// Looks once at every task not known to be finished and does those that it can claim, then at those
// of others until one is not finished. When none is left open the job is done. The last thread to
// finish a task always sees that, before it looks at another job: its finishing compare-and-swap
// comes before its look at the other words, and theirs likewise, so of any two the later one sees
// both finished. Should it die in between, a waiting thread finds the same.
WorkerThread::Outcome WorkerThread::pass(Progress& progress) {
  const layout::Job& job = progress.job;
  bool worked = false;
  std::size_t kept = 0, at = 0;
  for (; at < progress.open.size(); ++at) {
    const std::uint32_t task = progress.open[at];
    const std::uint64_t bits = ipc::load_acquire(shared_.work.task(job.channel, task));
    const layout::TaskWord word = layout::unpack(bits);
    if (word.epoch > job.epoch || shared_.stop.load(std::memory_order_relaxed) || over(job)) break;
    if (word.epoch == job.epoch && word.state == TaskState::finished) continue;
    const Claim claim = try_claim(progress, task, bits);
    if (claim == Claim::taken) {
      work_on(job, task, at + 1 < progress.open.size() ? progress.open[at + 1] : job.n_tasks);
    }
    worked = worked || claim != Claim::refused;
    progress.open[kept++] = task;  // looked at again below, by whomever it is finished
    if (claim == Claim::taken && layout::Work::is_ride(job) && channel_is_due()) {
      ++at;
      break;
    }
  }
  // After a break the rest is unseen and stays open.
  kept = static_cast<std::size_t>(
      std::move(progress.open.begin() + static_cast<std::ptrdiff_t>(at), progress.open.end(),
                progress.open.begin() + static_cast<std::ptrdiff_t>(kept)) -
      progress.open.begin());
  progress.open.resize(kept);
  if (worked) drop_finished(progress);
  if (progress.open.empty()) {
    ipc::ring(done(job), job.epoch);
    return Outcome::worked;
  }
  return worked ? Outcome::worked : Outcome::waiting;
}

// From the back, where a thread's last tasks are: of the others most are finished by then.
void WorkerThread::drop_finished(Progress& progress) const {
  while (!progress.open.empty()) {
    const layout::TaskWord word = layout::unpack(
        ipc::load_acquire(shared_.work.task(progress.job.channel, progress.open.back())));
    if (word.epoch != progress.job.epoch || word.state != TaskState::finished) return;
    progress.open.pop_back();
  }
}

wire::Doorbell* WorkerThread::done(const layout::Job& job) const {
  return layout::Work::is_ride(job) ? shared_.work.ride_done(job.channel - wire::kChannels)
                                    : &shared_.work.channel(job.channel)->done;
}

bool WorkerThread::lease_over(Seen& seen, std::uint64_t word) const {
  const std::uint64_t now = ipc::now_ns();
  if (seen.word != word) {
    seen = {word, now};
    return false;
  }
  return now - seen.since_ns > std::uint64_t{geometry_.lease_us} * 1000;
}

WorkerThread::Claim WorkerThread::try_claim(Progress& progress, std::uint32_t task,
                                            std::uint64_t bits) {
  const layout::Job& job = progress.job;
  const layout::TaskWord word = layout::unpack(bits);
  const bool steal = word.epoch == job.epoch && word.state == TaskState::claimed;
  if (steal && !lease_over(progress.seen[task], bits)) return Claim::refused;
  // `bits` was loaded before this: a sibling that claimed the task since makes the
  // compare-and-swap fail, one that claimed it before is seen here while it is inside.
  if (!shared_.siblings.enter(index_, job.channel, task)) {
    return steal ? Claim::refused : Claim::contended;
  }
  if (!ipc::cas(shared_.work.task(job.channel, task), bits,
                my_word(job.epoch, TaskState::claimed))) {
    shared_.siblings.leave(index_);
    return Claim::contended;
  }
  if (steal) count(counters_.stolen, 1);
  return Claim::taken;
}

std::uint64_t WorkerThread::my_word(std::uint64_t epoch, TaskState state) const {
  return layout::pack({epoch, state, shared_.row, index_});
}

// `next`: the task that this thread will look at afterwards, perhaps in vain; n_tasks for none.
void WorkerThread::work_on(const layout::Job& job, std::uint32_t task, std::uint32_t next) {
  shared_.fault.reach(FaultPoint::claimed);
  const std::uint64_t start = ipc::now_ns();
  const std::uint64_t bytes = compute(job, task, next);
  const std::uint64_t end = ipc::now_ns();
  count(counters_.busy_ns, end - start);
  count(counters_.kv_bytes, bytes);
  if (lane_.on()) note(job, task, {start, end, 0, bytes, 0, 0, 0, 0, 0, 0, 0, 0});
  shared_.fault.reach(FaultPoint::written);
  // No bytes: the descriptor was stale or wrong. The claim runs out, the task stays open.
  if (bytes != 0) finish(job, task);
  shared_.siblings.leave(index_);
  shared_.fault.reach(FaultPoint::finished);
}

// Nothing for an index past the end or when the descriptor was stale.
std::optional<WorkerThread::Place> WorkerThread::find(const layout::Job& job,
                                                      std::uint32_t task) const {
  const wire::WorkRow* rows = shared_.work.rows_of(job);
  std::uint32_t low = 0, high = job.n_rows;  // the last row whose first task is not after `task`
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (ipc::load_relaxed(&rows[middle].first_task) <= task ? low : high) = middle;
  }
  const std::uint32_t first_task = ipc::load_relaxed(&rows[low].first_task);
  const std::uint32_t n_splits = ipc::load_relaxed(&rows[low].n_splits);
  if (job.n_rows == 0 || task >= job.n_tasks || n_splits == 0 || first_task > task)
    return std::nullopt;
  const Task what{job.layer,
                  ipc::load_relaxed(&rows[low].slot),
                  ipc::load_relaxed(&rows[low].seq_len),
                  (task - first_task) / n_splits,
                  (task - first_task) % n_splits,
                  n_splits};
  return Place{what, low};
}

std::uint64_t WorkerThread::compute(const layout::Job& job, std::uint32_t task,
                                    std::uint32_t next) {
  std::byte* area =
      shared_.exchange.data() + layout_.area(geometry_, shared_.row, job.channel, task);
  if (shared_.fault.due(FaultPoint::computing)) {
    auto* torn = reinterpret_cast<float*>(area);
    std::fill(torn, torn + layout_.area_bytes / sizeof(float) / 2,
              std::numeric_limits<float>::quiet_NaN());
    shared_.fault.fire();
  }
  const auto place = find(job, task);
  if (!place) return 0;
  const auto follower = find(job, next);
  const std::byte* q_row =
      shared_.exchange.data() + layout_.q_row(geometry_, job.channel, place->row);
  return runner_.run(place->task, q_row, area, follower ? &follower->task : nullptr);
}

// Before the task is finished, while its descriptor stands.
void WorkerThread::note(const layout::Job& job, std::uint32_t task, wire::Span span) {
  const auto place = find(job, task);
  if (!place) return;
  span.kind = static_cast<std::uint32_t>(wire::SpanKind::attend);
  span.layer = job.layer;
  span.channel = job.channel;
  span.slot = place->task.slot;
  span.kv_head = place->task.kv_head;
  span.split = place->task.split;
  span.tokens = place->task.seq_len;
  lane_.add(span);
}

void WorkerThread::finish(const layout::Job& job, std::uint32_t task) {
  std::uint64_t* word = shared_.work.task(job.channel, task);
  std::uint64_t expected = my_word(job.epoch, TaskState::claimed);
  const std::uint64_t mine = my_word(job.epoch, TaskState::finished);
  while (!ipc::cas(word, expected, mine)) {  // ends: a word is stolen once a lease at most
    const layout::TaskWord found = layout::unpack(expected);
    if (found.epoch != job.epoch || found.state != TaskState::claimed) {
      count(counters_.lost, 1);
      return;
    }
  }
  count(counters_.tasks, 1);
}

}  // namespace neo::attn_worker
