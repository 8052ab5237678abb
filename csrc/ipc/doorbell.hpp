// A doorbell: an epoch that only grows, and a futex to sleep on until it does.
//
// Any process may wait; any process may ring. `value` never falls, so a late or repeated ring is
// harmless and a waiter needs no ownership.
//
// No wake-up is lost. The two sides are
//
//   ringer   R1 raise value   R2 full fence   R3 read sleepers -> if set: R4 clear it
//                                                              R5 bump futex, wake all
//   waiter   W1 read futex    W2 set sleepers, full fence      W3 read value -> if old: sleep
//
// R2 and W2 are in one total order. If R2 comes first, W3 sees the new value and does not sleep. If
// W2 comes first, R3 sees the flag unless another ringer has cleared it since (R4). That ringer
// bumps the futex word after clearing, and the waiter read the word before setting the flag: had it
// read the bumped word, its flag would come after the clearing. So the kernel either finds the word
// changed since W1 and returns at once, or this waiter is among those woken.
//
// `sleepers` is a flag and no count, so that a waiter killed in its sleep leaves nothing behind but
// one needless system call for the next ring.
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

// Ends every sleep, whatever the epoch. Who sleeps finds out by itself what for.
inline void wake_all(wire::Doorbell* bell) {
  store_seq_cst(&bell->sleepers, 0u);  // R4
  add(&bell->futex, 1u);               // R5
  // Not FUTEX_PRIVATE: the sleepers are other processes.
  syscall(SYS_futex, &bell->futex, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Raises the epoch to `value` (no effect when it is there already) and wakes every waiter.
inline void ring(wire::Doorbell* bell, std::uint64_t value) {
  max_store(&bell->value, value);                  // R1, pairs with the acquire load in W3
  full_fence();                                    // R2
  if (load_relaxed(&bell->sleepers) == 0) return;  // R3
  wake_all(bell);
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
// is over, or `hopeless()`, which is asked before each sleep; who makes it true calls wake_all
// afterwards.
template <typename Hopeless>
bool wait_unless(wire::Doorbell* bell, std::uint64_t target, std::uint64_t timeout_ns,
                 std::uint32_t spin_us, const Hopeless& hopeless) {
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
    const std::uint32_t ticket = load_acquire(&bell->futex);  // W1
    store_seq_cst(&bell->sleepers, 1u);                       // W2
    full_fence();
    if (reached(bell, target)) return true;  // W3
    if (hopeless()) return false;
    detail::futex_sleep(bell, ticket, deadline - now);
  }
  return reached(bell, target);
}

inline bool wait(wire::Doorbell* bell, std::uint64_t target, std::uint64_t timeout_ns,
                 std::uint32_t spin_us) {
  return wait_unless(bell, target, timeout_ns, spin_us, [] { return false; });
}

}  // namespace neo::ipc
