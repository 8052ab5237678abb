// The whole hand-over in one process: an exchange and workers over segments in private files.
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "layout/task_word.hpp"
#include "world.hpp"

using neo::layout::TaskWord;
using neo::wire::TaskState;
using world::Exchange;
using world::kMinute;
using world::World;

namespace {

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
  desc->n_tasks[0] = world.g.max_tasks + 1;
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
