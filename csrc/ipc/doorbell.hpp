// A doorbell: an epoch that only grows, and a futex to sleep on until it does.
//
// Any process may wait; any process may ring. `value` never falls, so a late or repeated ring is
// harmless and a waiter needs no ownership.
//
// No wake-up is lost. The two sides are
//
//   ringer   R1 raise value      R2 full fence    R3 read sleepers -> if > 0: bump futex, wake
//   waiter   W1 raise sleepers   W2 full fence    W3 read futex    W4 read value -> if old: sleep
//
// R2 and W2 are in one total order. If R2 comes first, W4 sees the new value and does not sleep. If
// W2 comes first, R3 sees the sleeper, bumps the futex word and wakes: the kernel then either finds
// the word already changed since W3 (and returns at once) or wakes the sleeper. If W3 already read
// the bumped word, its acquire pairs with the bump's release and W4 sees the value.
//
// A waiter killed in its sleep leaves `sleepers` too high. That costs each later ring a needless
// system call and breaks nothing.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <ctime>

#include "ipc/atomics.hpp"
#include "ipc/clock.hpp"
#include "protos/wire.hpp"

namespace neo::ipc {

// Raises the epoch to `value` (no effect when it is there already) and wakes every waiter.
inline void ring(wire::Doorbell* bell, std::uint64_t value) {
  max_store(&bell->value, value);                  // R1, pairs with the acquire load in W4
  full_fence();                                    // R2
  if (load_relaxed(&bell->sleepers) == 0) return;  // R3
  add(&bell->futex, 1u);
  // Not FUTEX_PRIVATE: the sleepers are other processes.
  syscall(SYS_futex, &bell->futex, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline bool reached(const wire::Doorbell* bell, std::uint64_t target) {
  return load_acquire(&bell->value) >= target;
}

namespace detail {

inline void futex_sleep(wire::Doorbell* bell, std::uint32_t expected, std::uint64_t for_ns) {
  timespec timeout{static_cast<std::time_t>(for_ns / 1'000'000'000ULL),
                   static_cast<long>(for_ns % 1'000'000'000ULL)};
  // EAGAIN, EINTR and ETIMEDOUT all mean: look again. The caller's loop does.
  syscall(SYS_futex, &bell->futex, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

}  // namespace detail

// Waits until the epoch is at least `target`: spins for `spin_us`, then sleeps. False: `timeout_ns`
// is over.
inline bool wait(wire::Doorbell* bell, std::uint64_t target, std::uint64_t timeout_ns,
                 std::uint32_t spin_us) {
  if (reached(bell, target)) return true;
  const std::uint64_t start = now_ns();
  const std::uint64_t deadline = start + timeout_ns;
  const std::uint64_t spin_end = start + std::uint64_t{spin_us} * 1000;
  while (spin_us != 0 && now_ns() < spin_end) {
    for (int i = 0; i < 32; ++i) {
      if (reached(bell, target)) return true;
      spin_pause();
    }
  }
  for (std::uint64_t now = now_ns(); now < deadline; now = now_ns()) {
    add(&bell->sleepers, 1u);                                 // W1
    full_fence();                                             // W2
    const std::uint32_t ticket = load_acquire(&bell->futex);  // W3
    const bool done = reached(bell, target);                  // W4
    if (!done) detail::futex_sleep(bell, ticket, deadline - now);
    sub(&bell->sleepers, 1u);
    if (done) return true;
  }
  return reached(bell, target);
}

}  // namespace neo::ipc
