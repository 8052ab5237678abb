// Jobs of riders under many threads: waves that move, stand still, lose riders and begin anew,
// while jobs of a sub-batch come between and workers join and leave.
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ipc/doorbell.hpp"
#include "world.hpp"

using neo::offload::AnnouncedMove;
using neo::offload::Collector;
using neo::offload::DecodeRows;
using neo::offload::Move;
using world::Exchange;
using world::kMinute;
using world::World;

namespace {

constexpr std::uint32_t kCapacity = 3;
constexpr std::size_t kRow = 4 * 16;  // floats of a row of Q

struct Wave {
  std::uint32_t group = 0;
  std::int32_t stage = -1;  // of the last plan that moved it
  std::vector<std::uint32_t> places, slots, lens;

  Move move() const {
    return {group,
            static_cast<std::uint32_t>(stage + 1),
            places.data(),
            {slots.data(), lens.data(), slots.size()}};
  }
  void erase(std::size_t i) {
    for (auto* column : {&places, &slots, &lens}) {
      column->erase(column->begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
};

class Waves {
 public:
  Waves(World& world, unsigned seed) : world_(world), draw_(seed), waves_(world.g.ride_groups) {
    for (std::uint32_t group = 0; group < world.g.ride_groups; ++group) waves_[group].group = group;
  }

  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(draw_() % n); }

  // Some groups by stage, no two at the same.
  std::vector<Wave*> choose() {
    std::vector<Wave*> chosen;
    for (std::int32_t stage = -1; stage < last_stage(); ++stage) {
      for (Wave& wave : waves_) {
        if (wave.stage != stage || below(4) == 0) continue;
        if (stage == -1 && wave.places.empty()) fill(wave);
        if (stage >= 0 && wave.places.size() > 1 && below(6) == 0) {
          wave.erase(below(static_cast<std::uint32_t>(wave.places.size())));
        }
        chosen.push_back(&wave);
        break;
      }
    }
    return chosen;
  }

  // After the plan: who is through, or is lost with all riders, begins anew.
  void settle(const std::vector<Wave*>& moved) {
    for (Wave* wave : moved) {
      ++wave->stage;
      const bool lost = may_lose(*wave) && below(20) == 0;
      if (wave->stage == last_stage() || lost) *wave = Wave{wave->group, -1, {}, {}, {}};
    }
  }

  std::int32_t last_stage() const { return static_cast<std::int32_t>(world_.g.n_layers); }

 private:
  // A thread that is still at an abandoned job reads its Q while the next one's is written, and
  // what it makes of that reaches nobody; to ThreadSanitizer it is a race, by the letter.
  bool may_lose(const Wave& wave) const {
#ifdef __SANITIZE_THREAD__
    (void)wave;
    return false;
#else
    return wave.stage < last_stage();
#endif
  }

  void fill(Wave& wave) {
    for (std::uint32_t place = 0; place < kCapacity; ++place) {
      if (below(3) == 0 && !(place == kCapacity - 1 && wave.places.empty())) continue;
      wave.places.push_back(place);
      wave.slots.push_back(below(4));
      wave.lens.push_back(below(32) + 1);
    }
  }

  World& world_;
  std::mt19937 draw_;
  std::vector<Wave> waves_;
};

void check_row(const float* row, std::uint32_t slot) {
  for (std::size_t i = 0; i < kRow; ++i) {
    CHECK(std::fabs(row[i] - static_cast<float>(slot + 1)) < 1e-5f);
  }
}

void advance(Exchange& exchange, const Wave& wave, std::uint32_t n_layers) {
  const auto stage = static_cast<std::uint32_t>(wave.stage + 1);
  const std::vector<float> q(wave.slots.size() * kRow, 0.5f);
  if (stage > 0) {
    std::vector<float> out(q.size());
    CHECK(exchange.rides().wait(wave.group, kMinute));
    exchange.rides().collect(wave.group, reinterpret_cast<std::byte*>(out.data()));
    for (std::size_t i = 0; i < wave.slots.size(); ++i) check_row(&out[i * kRow], wave.slots[i]);
  }
  if (stage < n_layers) {
    exchange.rides().publish(wave.group, reinterpret_cast<const std::byte*>(q.data()));
  }
}

// One sub-batch of one row, all layers, while the waves stand still or move along.
void run_channel(Exchange& exchange, std::uint32_t layer, std::uint32_t slot) {
  const std::vector<float> q(kRow, 0.5f);
  std::vector<float> out(kRow);
  exchange.publish(1, layer, reinterpret_cast<const std::byte*>(q.data()));
  CHECK(exchange.wait(1, kMinute));
  exchange.collect(1, reinterpret_cast<std::byte*>(out.data()));
  check_row(out.data(), slot);
}

void waves_are_answered_whoever_joins_and_leaves(std::uint32_t lease_us, unsigned seed) {
  World world(lease_us, kCapacity);
  std::vector<std::unique_ptr<neo::attn_worker::AttentionWorker>> pool;
  for (std::uint32_t row = 0; row < 2; ++row) pool.push_back(world.worker(row, 2));
  auto exchange = world.exchange();
  Waves waves(world, seed);
  for (std::uint64_t plan = 0; plan < 1000; ++plan) {
    const std::vector<Wave*> moved = waves.below(5) == 0 ? std::vector<Wave*>{} : waves.choose();
    std::vector<Move> moves;
    for (const Wave* wave : moved) moves.push_back(wave->move());
    const std::uint32_t slot = waves.below(4), len = waves.below(32) + 1;
    const bool batch = waves.below(3) == 0;
    exchange->begin_plan(plan, {{{nullptr, nullptr, 0}, {&slot, &len, batch ? 1u : 0u}}}, moves);
    std::size_t next = 0;
    for (std::uint32_t stage = 0; stage <= world.g.n_layers; ++stage) {
      if (next < moved.size() && moves[next].stage == stage) {
        advance(*exchange, *moved[next++], world.g.n_layers);
      }
      if (batch && stage < world.g.n_layers) run_channel(*exchange, stage, slot);
    }
    exchange->end_plan();
    waves.settle(moved);
    if (plan % 97 == 0) {
      const std::uint32_t row = waves.below(2);
      pool[row]->stop();
      world.control->clear_row(row);
      pool[row] = world.worker(row, 1 + waves.below(3));
    }
  }
}

// What kernels do: plans are announced one ahead, and nobody is woken by a publish.
void a_device_finds_its_waves_answered(unsigned seed) {
  World world(20'000, kCapacity);
  auto first = world.worker(0, 2), second = world.worker(1, 1);
  auto exchange = world.exchange();
  Waves waves(world, seed);
  Collector collector(world.work, world.exchange_segment, world.g);
  struct Flight {
    std::vector<Wave> waves;
    std::vector<Move> moves;
    std::vector<AnnouncedMove> announced;
  };
  const auto run = [&](const Flight& flight) {
    for (std::size_t i = 0; i < flight.waves.size(); ++i) {
      const Wave& wave = flight.waves[i];
      const AnnouncedMove& move = flight.announced[i];
      std::vector<float> out(kRow);
      while (!neo::ipc::reached(world.work.ride_done(wave.group), move.collects)) {
        std::this_thread::yield();
      }
      for (std::size_t row = 0; row < move.collected.size(); ++row) {
        collector.collect(neo::layout::ride_channel(wave.group), move.collects, move.collected[row],
                          reinterpret_cast<std::byte*>(out.data()));
        check_row(out.data(), wave.slots[row]);
      }
      if (move.publishes == 0) continue;
      const neo::layout::ExchangeLayout layout(world.g);
      const std::vector<float> q(kRow, 0.5f);
      for (const std::uint32_t place : wave.places) {
        const auto at = layout.q_row(world.g, neo::layout::ride_channel(wave.group), place);
        std::memcpy(world.exchange_segment->data() + at, q.data(), layout.q_row_bytes);
      }
      neo::ipc::store_release(&world.work.ride_queue()->published, move.publishes);
    }
  };
  Flight ahead;
  std::uint64_t running = 0;  // the plan in flight; plans count from 1
  for (std::uint64_t plan = 1; plan < 300; ++plan) {
    const std::vector<Wave*> moved = waves.choose();
    Flight next;
    for (const Wave* wave : moved) next.waves.push_back(*wave);
    for (const Wave& wave : next.waves) next.moves.push_back(wave.move());
    const auto announced =
        exchange->announce(plan, {{{nullptr, nullptr, 0}, {nullptr, nullptr, 0}}}, next.moves);
    next.announced = announced.moves;
    waves.settle(moved);
    if (running != 0) {
      run(ahead);
      exchange->retire(running);
    }
    ahead = std::move(next);
    running = plan;
  }
  run(ahead);
  exchange->retire(running);
}

void a_job_that_stands_in_the_way_of_its_successor_is_given_up() {
  World world(20'000, 1);
  auto exchange = world.exchange();  // and nobody works
  const std::uint32_t zero = 0, five = 5;
  const auto begin = [&](std::uint64_t plan, std::uint32_t group) {
    const Move move{group, 0, &zero, {&zero, &five, 1}};
    exchange->begin_plan(plan, {{{nullptr, nullptr, 0}, {nullptr, nullptr, 0}}}, {move});
    const std::vector<float> q(kRow, 0.5f);
    exchange->rides().publish(group, reinterpret_cast<const std::byte*>(q.data()));
    exchange->end_plan();
  };
  begin(0, 0);
  const std::uint32_t descs = neo::layout::n_ride_descs(world.g);
  for (std::uint64_t plan = 1; plan < descs; ++plan) begin(plan, 1);
  CHECK(neo::ipc::load_acquire(&world.work.ride_queue()->abort) == 0);
  begin(descs, 1);
  CHECK(neo::ipc::load_acquire(&world.work.ride_queue()->abort) == 1);  // group 0's job
  CHECK(!world.work.find_ride(1) && world.work.find_ride(descs + 1));
}

void a_ride_descriptor_being_rewritten_is_not_read() {
  World world(20'000, 2);
  neo::wire::RideDesc* desc = world.work.ride_desc(5);
  desc->group = 3;
  desc->layer = 2;
  desc->n_rows = 2;
  desc->n_tasks = 4;
  CHECK(!world.work.find_ride(5));  // job 0: being written
  desc->job = 5;
  const auto job = world.work.find_ride(5);
  CHECK(job && job->channel == 5 && job->layer == 2 && job->n_tasks == 4);
  CHECK(!world.work.find_ride(5 + neo::layout::n_ride_descs(world.g)));
  desc->layer = 3;
  CHECK(!world.work.find_ride(5));
  desc->layer = 0;
  desc->group = 4;
  CHECK(!world.work.find_ride(5));
  desc->group = 0;
  desc->n_tasks = neo::layout::ride_tasks(world.g) + 1;
  CHECK(!world.work.find_ride(5));
}

}  // namespace

int main() {
  that("a ride descriptor being rewritten is not read",
       a_ride_descriptor_being_rewritten_is_not_read);
  that("a job that stands in the way of its successor is given up",
       a_job_that_stands_in_the_way_of_its_successor_is_given_up);
  for (unsigned seed = 1; seed <= 3; ++seed) {
    that("waves are answered, whoever joins and leaves",
         [seed] { waves_are_answered_whoever_joins_and_leaves(20'000, seed); });
    that("a device finds its waves answered", [seed] { a_device_finds_its_waves_answered(seed); });
  }
#ifndef __SANITIZE_THREAD__
  that("waves are answered under leases shorter than a task",
       [] { waves_are_answered_whoever_joins_and_leaves(1, 7); });
#endif
}
