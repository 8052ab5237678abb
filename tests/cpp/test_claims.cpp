// The whole hand-over in one process: an exchange and workers over segments in private files.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "attn_worker/attention_worker.hpp"
#include "check.hpp"
#include "layout/task_word.hpp"
#include "offload/exchange.hpp"

using neo::attn_worker::AttentionWorker;
using neo::layout::Control;
using neo::layout::TaskWord;
using neo::offload::Exchange;
using neo::wire::Geometry;
using neo::wire::SegmentKind;
using neo::wire::TaskState;
using SegmentPtr = std::shared_ptr<neo::ipc::Segment>;

namespace {

constexpr std::uint64_t kMinute = 60'000'000'000;

Geometry small_geometry(std::uint32_t lease_us) {
  Geometry g{};
  g.n_layers = 3;
  g.n_heads = 4;
  g.n_kv_heads = 2;
  g.head_dim = 16;
  g.block_size = 16;
  g.page_size = 8;
  g.n_pages = 16;
  g.max_slots = 4;
  g.max_rows = 4;
  g.max_tokens = 8;
  g.max_blocks = 4;
  g.max_pages = 4;
  g.max_tasks = 16;
  g.n_plans = 2;
  g.max_workers = 4;
  g.world_size = 1;
  g.lease_us = lease_us;
  return g;
}

SegmentPtr make(SegmentKind kind, const Geometry& g) {
  const int fd = memfd_create("neo-test", MFD_CLOEXEC);
  CHECK(fd >= 0);
  auto segment = neo::layout::create_segment(fd, kind, g, 1);
  close(fd);
  return segment;
}

// V of every token of a slot is the slot's number + 1, so attention over it gives that number.
struct World {
  explicit World(std::uint32_t lease_us = 20'000)
      : g(small_geometry(lease_us)),
        control(std::make_shared<Control>(make(SegmentKind::control, g))),
        work_segment(make(SegmentKind::work, g)),
        exchange_segment(make(SegmentKind::exchange, g)),
        cache_segment(make(SegmentKind::cpu_cache, g)),
        sequences_segment(make(SegmentKind::sequences, g)),
        work(work_segment, g) {
    auto sequences = std::make_shared<neo::layout::Sequences>(sequences_segment, g);
    neo::offload::CpuCache cache(cache_segment, sequences, g);
    for (std::uint32_t slot = 0; slot < 4; ++slot) {
      for (std::uint32_t page = 0; page < 4; ++page) {
        sequences->page_table()[slot * 4 + page] = slot * 4 + page;
      }
      const std::vector<float> rows(32 * 2 * 16, static_cast<float>(slot + 1));
      const auto* bytes = reinterpret_cast<const std::byte*>(rows.data());
      for (std::uint32_t layer = 0; layer < 3; ++layer) {
        cache.store_span(layer, slot, 0, 32, bytes, bytes);
      }
    }
  }
  std::unique_ptr<AttentionWorker> worker(std::uint32_t row, std::uint32_t threads) {
    auto made = std::make_unique<AttentionWorker>(
        neo::attn_worker::WorkerSegments{control, work_segment, exchange_segment, cache_segment,
                                         sequences_segment},
        neo::attn_worker::WorkerOptions{row, threads, {}, ""});
    made->start();
    return made;
  }
  std::unique_ptr<Exchange> exchange() {
    return std::make_unique<Exchange>(control, work_segment, exchange_segment, g);
  }

  Geometry g;
  std::shared_ptr<Control> control;
  SegmentPtr work_segment, exchange_segment, cache_segment, sequences_segment;
  neo::layout::Work work;
};

void run_plan(Exchange& exchange, std::uint64_t plan, const std::vector<std::uint32_t>& slots,
              const std::vector<std::uint32_t>& lens) {
  exchange.begin_plan(plan, {{{slots.data(), lens.data(), slots.size()}, {nullptr, nullptr, 0}}});
  std::vector<float> q(slots.size() * 64, 0.5f), out(q.size());
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    exchange.publish(0, layer, reinterpret_cast<const std::byte*>(q.data()));
    CHECK(exchange.wait(0, kMinute));
    exchange.collect(0, reinterpret_cast<std::byte*>(out.data()));
    for (std::size_t i = 0; i < out.size(); ++i) {
      CHECK(std::fabs(out[i] - static_cast<float>(slots[i / 64] + 1)) < 1e-5f);
    }
  }
  exchange.end_plan();
}

void many_small_jobs_are_all_answered(std::uint32_t lease_us) {
  World world(lease_us);
  auto first = world.worker(0, 2), second = world.worker(1, 2);
  auto exchange = world.exchange();
  for (std::uint64_t plan = 0; plan < 700; ++plan) {
    const auto rows = static_cast<std::uint32_t>(plan % 4 + 1);
    std::vector<std::uint32_t> slots, lens;
    for (std::uint32_t i = 0; i < rows; ++i) {
      slots.push_back(static_cast<std::uint32_t>((plan + i) % 4));
      lens.push_back(static_cast<std::uint32_t>((plan * 7 + i * 5) % 32 + 1));
    }
    run_plan(*exchange, plan, slots, lens);
  }
}

// Forges the words of workers that died or stand still: the claim must be taken over.
void claims_that_nobody_will_finish_are_taken_over() {
  World world(1000);
  auto exchange = world.exchange();
  const std::vector<std::uint32_t> slots{0, 1}, lens{9, 20};
  exchange->begin_plan(0, {{{slots.data(), lens.data(), 2}, {nullptr, nullptr, 0}}});
  const std::vector<float> q(128, 0.5f);
  exchange->publish(0, 0, reinterpret_cast<const std::byte*>(q.data()));
  const std::uint64_t epoch = neo::ipc::load_acquire(&world.work.channel(0)->published.value);
  *world.work.task(0, 0) = neo::layout::pack({epoch, TaskState::claimed, 3, 7});
  *world.work.task(0, 3) = neo::layout::pack({epoch, TaskState::claimed, 0, 0});
  auto worker = world.worker(0, 2);  // the very row and thread of the second claim
  CHECK(exchange->wait(0, kMinute));
  std::vector<float> out(128);
  exchange->collect(0, reinterpret_cast<std::byte*>(out.data()));
  CHECK(std::fabs(out[0] - 1.0f) < 1e-5f && std::fabs(out[127] - 2.0f) < 1e-5f);
  exchange->end_plan();
  worker->stop();
  CHECK(world.control->worker(0)->stolen == 2);
  CHECK(world.control->worker(0)->tasks == 4);
}

void words_of_any_older_epoch_are_claimable_and_of_a_later_one_are_not() {
  World world;
  auto exchange = world.exchange();
  const std::vector<std::uint32_t> slots{2}, lens{5};
  exchange->begin_plan(0, {{{slots.data(), lens.data(), 1}, {nullptr, nullptr, 0}}});
  const std::vector<float> q(64, 0.5f);
  exchange->publish(0, 0, reinterpret_cast<const std::byte*>(q.data()));
  const std::uint64_t epoch = neo::ipc::load_acquire(&world.work.channel(0)->published.value);
  const std::uint64_t later = neo::layout::pack({epoch + 5, TaskState::free, 0, 0});
  *world.work.task(0, 0) = later;
  *world.work.task(0, 1) = neo::layout::pack({epoch - 1, TaskState::claimed, 2, 2});
  auto worker = world.worker(0, 1);
  CHECK(!exchange->wait(0, 50'000'000));
  CHECK(neo::ipc::load_acquire(world.work.task(0, 0)) == later);
  exchange->abort(0);
  exchange->end_plan();
}

void a_descriptor_being_rewritten_is_not_read() {
  World world;
  neo::wire::WorkDesc* desc = world.work.desc(1);
  desc->n_rows[0] = 1;
  desc->n_tasks[0] = 2;
  desc->n_layers = 3;
  CHECK(!world.work.find_job(0, 10));  // first_epoch 0: being written
  desc->first_epoch[0] = 10;
  CHECK(world.work.find_job(0, 12) && world.work.find_job(0, 12)->layer == 2);
  CHECK(!world.work.find_job(0, 9) && !world.work.find_job(0, 13));
  desc->n_tasks[0] = 17;  // above max_tasks
  CHECK(!world.work.find_job(0, 10));
}

void siblings_never_share_a_task() {
  neo::attn_worker::Siblings siblings(2);
  CHECK(siblings.enter(0, 1, 7));
  CHECK(!siblings.enter(1, 1, 7));
  CHECK(siblings.enter(1, 0, 7));
  siblings.leave(1);
  siblings.leave(0);
  CHECK(siblings.enter(1, 1, 7));
}

}  // namespace

int main() {
  that("siblings never share a task", siblings_never_share_a_task);
  that("a descriptor being rewritten is not read", a_descriptor_being_rewritten_is_not_read);
  that("claims that nobody will finish are taken over",
       claims_that_nobody_will_finish_are_taken_over);
  that("words of any older epoch are claimable and of a later one are not",
       words_of_any_older_epoch_are_claimable_and_of_a_later_one_are_not);
  that("many small jobs are all answered", [] { many_small_jobs_are_all_answered(20'000); });
#ifndef __SANITIZE_THREAD__
  // A thread that lost its claim may still read Q rows while the next job's are written. What it
  // makes of them reaches nobody, which is the point here, but it is a race by the letter.
  that("many small jobs are answered under leases shorter than a task",
       [] { many_small_jobs_are_all_answered(1); });
#endif
}
