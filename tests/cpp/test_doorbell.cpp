#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ipc/doorbell.hpp"

using neo::ipc::ring;
using neo::ipc::wait;
using neo::wire::Doorbell;

namespace {

constexpr std::uint64_t kMinute = 60'000'000'000;

void a_wait_for_what_is_there_returns_at_once() {
  Doorbell bell{};
  ring(&bell, 5);
  CHECK(wait(&bell, 5, 0, 0));
  CHECK(wait(&bell, 1, 0, 0));
  CHECK(!wait(&bell, 6, 1'000'000, 10));
}

void an_epoch_never_falls() {
  Doorbell bell{};
  ring(&bell, 9);
  ring(&bell, 3);
  CHECK(bell.value == 9);
}

// Two threads hand a token to and fro without spinning: one lost wake-up and a wait times out.
void no_wake_up_is_lost(std::uint32_t spin_us) {
  constexpr std::uint64_t kRounds = 20'000;
  Doorbell there{}, back{};
  std::thread echo([&] {
    for (std::uint64_t i = 1; i <= kRounds; ++i) {
      CHECK(wait(&there, i, kMinute, spin_us));
      ring(&back, i);
    }
  });
  for (std::uint64_t i = 1; i <= kRounds; ++i) {
    ring(&there, i);
    CHECK(wait(&back, i, kMinute, spin_us));
  }
  echo.join();
}

// What remains of a waiter that was killed in its sleep.
void a_dead_sleeper_costs_one_wake_up() {
  Doorbell bell{};
  bell.sleepers = 1;
  ring(&bell, 1);
  CHECK(bell.sleepers == 0 && bell.futex == 1);
  ring(&bell, 2);
  CHECK(bell.futex == 1);
}

// Many waiters and two ringers on one bell, each round a different set of them asleep.
void no_wake_up_is_lost_when_ringers_race() {
  constexpr std::uint64_t kRounds = 4'000;
  Doorbell bell{}, back{};
  std::atomic<std::uint64_t> arrived{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back([&] {
      for (std::uint64_t round = 1; round <= kRounds; ++round) {
        CHECK(wait(&bell, round, kMinute, 0));
        if (arrived.fetch_add(1) + 1 == round * 3) ring(&back, round);
      }
    });
  }
  const auto ringer = [&] {
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      ring(&bell, round);
      CHECK(wait(&back, round, kMinute, 0));
    }
  };
  std::thread other(ringer);
  ringer();
  other.join();
  for (auto& waiter : waiters) waiter.join();
}

void a_hopeless_wait_ends_without_a_ring() {
  Doorbell bell{};
  std::atomic<bool> hopeless{false}, noticed{false};
  std::thread waiter([&] {
    CHECK(!neo::ipc::wait_unless(&bell, 1, kMinute, 0, [&] {
      if (hopeless.load()) noticed.store(true);
      return hopeless.load();
    }));
  });
  while (neo::ipc::load_acquire(&bell.sleepers) == 0) std::this_thread::yield();
  hopeless.store(true);
  neo::ipc::wake_all(&bell);
  waiter.join();
  CHECK(noticed.load());  // and it was not the time that ended the wait
}

void one_ring_wakes_every_sleeper() {
  Doorbell bell{};
  std::vector<std::thread> sleepers;
  std::atomic<int> woken{0};
  for (int i = 0; i < 8; ++i) {
    sleepers.emplace_back([&] { woken += wait(&bell, 1, kMinute, 0); });
  }
  while (neo::ipc::load_acquire(&bell.sleepers) == 0) std::this_thread::yield();
  ring(&bell, 1);
  for (auto& sleeper : sleepers) sleeper.join();
  CHECK(woken == 8);
}

}  // namespace

int main() {
  that("a wait for what is there returns at once", a_wait_for_what_is_there_returns_at_once);
  that("an epoch never falls", an_epoch_never_falls);
  that("no wake-up is lost by sleepers", [] { no_wake_up_is_lost(0); });
  that("no wake-up is lost by spinners that fall asleep", [] { no_wake_up_is_lost(3); });
  that("one ring wakes every sleeper", one_ring_wakes_every_sleeper);
  that("a dead sleeper costs one wake-up", a_dead_sleeper_costs_one_wake_up);
  that("no wake-up is lost when ringers race", no_wake_up_is_lost_when_ringers_race);
  that("a hopeless wait ends without a ring", a_hopeless_wait_ends_without_a_ring);
}
