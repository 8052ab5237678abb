// A bounded ring of fixed-size slots between two processes. Payload lies in the slots.
//
// Who may call what: one Producer (acquire, publish) and one Consumer (wait, front, release), each
// a live object. A second one of a role is refused while the process behind the first is alive;
// after its death the next takes the role over and goes on where shared memory stands.
//
//        released      in flight            free
//   ... ───────────┬───────────────────┬──────────────── ...     index grows for ever,
//                head                 tail                       slot = index % n_slots
//            consumer's            producer's
//
// A slot belongs to the producer from acquire to publish, to the consumer from front to release. A
// producer killed in mid-write has published nothing; a consumer killed in mid-read leaves the slot
// for its successor. Each side caches the other's index on its own cache line and reads the real
// one only when the cache says full (or empty), so a steady stream costs one line transfer per
// slot. Full and empty are return values.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "ipc/atomics.hpp"
#include "ipc/clock.hpp"
#include "ipc/doorbell.hpp"
#include "ipc/errors.hpp"
#include "protos/wire.hpp"

namespace neo::ipc {

// Holds a role word for as long as the object lives.
class RoleHold {
 public:
  // `takeover`: the caller knows by other means (its liveness lock) that a holder named in the word
  // is dead, which a process id cannot tell across containers.
  RoleHold(std::uint32_t* pid_word, const char* role, bool takeover) : word_(pid_word) {
    const auto self = static_cast<std::uint32_t>(getpid());
    std::lock_guard<std::mutex> guard(registry_mutex());
    std::uint32_t holder = load_acquire(word_);
    for (;;) {
      const bool ours = registry().count(word_) != 0;
      if (holder != 0 && (ours || (!takeover && holder != self && alive(holder)))) {
        throw NativeError(std::string("the ring has a live ") + role + ", process " +
                          std::to_string(holder));
      }
      if (cas(word_, holder, self)) break;
    }
    registry().insert(word_);
  }
  ~RoleHold() {
    std::lock_guard<std::mutex> guard(registry_mutex());
    registry().erase(word_);
    std::uint32_t self = static_cast<std::uint32_t>(getpid());
    cas(word_, self, 0u);
  }
  RoleHold(const RoleHold&) = delete;
  RoleHold& operator=(const RoleHold&) = delete;

  static bool alive(std::uint32_t pid) {
    return pid != 0 && (kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM);
  }

 private:
  // The roles this process holds: a word that shows our own id and is not in here was left by a
  // dead predecessor with the same id (every container's first process is number 1).
  static std::set<std::uint32_t*>& registry() {
    static std::set<std::uint32_t*> held;
    return held;
  }
  static std::mutex& registry_mutex() {
    static std::mutex mutex;
    return mutex;
  }

  std::uint32_t* word_;
};

inline std::byte* ring_slot(wire::RingHeader* ring, std::uint64_t index) {
  auto* slots = reinterpret_cast<std::byte*>(ring) + sizeof(wire::RingHeader);
  return slots + (index % ring->n_slots) * ring->slot_bytes;
}

class Producer {
 public:
  explicit Producer(wire::RingHeader* ring, bool takeover = false)
      : ring_(ring), hold_(&ring->producer_pid, "producer", takeover) {
    ring_->cached_head = load_acquire(&ring_->head);
  }

  // The slot to fill, or nullptr: ring full. The same slot until publish().
  std::byte* acquire() {
    const std::uint64_t tail = load_relaxed(&ring_->tail);
    if (tail - ring_->cached_head >= ring_->n_slots) {
      ring_->cached_head = load_acquire(&ring_->head);  // A1 pairs with R1 in Consumer::release
      if (tail - ring_->cached_head >= ring_->n_slots) return nullptr;
    }
    return ring_slot(ring_, tail);
  }

  void publish() {
    const std::uint64_t tail = load_relaxed(&ring_->tail) + 1;
    store_release(&ring_->tail, tail);  // R2 pairs with A2 in Consumer::front
    ring(&ring_->bell, tail);
  }

  // Empties the ring. Only while no consumer lives: `head` is the consumer's. `takeover`: the
  // caller knows that none does (it saw the role's lock free), whatever the pid left behind means
  // here.
  void reset(bool takeover = false) {
    const std::uint32_t consumer = load_acquire(&ring_->consumer_pid);
    if (takeover) {
      store_release(&ring_->consumer_pid, std::uint32_t{0});
    } else if (RoleHold::alive(consumer)) {
      throw NativeError("reset of a ring whose consumer, process " + std::to_string(consumer) +
                        ", is alive");
    }
    ring_->cached_head = load_relaxed(&ring_->tail);
    store_release(&ring_->head, ring_->cached_head);
  }

 private:
  wire::RingHeader* ring_;
  RoleHold hold_;
};

class Consumer {
 public:
  explicit Consumer(wire::RingHeader* ring, bool takeover = false)
      : ring_(ring), hold_(&ring->consumer_pid, "consumer", takeover) {
    ring_->cached_tail = load_acquire(&ring_->tail);
  }

  // The oldest slot, or nullptr: ring empty. The same slot until release().
  std::byte* front() {
    const std::uint64_t head = load_relaxed(&ring_->head);
    if (head == ring_->cached_tail) {
      ring_->cached_tail = load_acquire(&ring_->tail);  // A2 pairs with R2 in Producer::publish
      if (head == ring_->cached_tail) return nullptr;
    }
    return ring_slot(ring_, head);
  }

  void release() {
    store_release(&ring_->head, load_relaxed(&ring_->head) + 1);  // R1 pairs with A1
  }

  // True: front() has a slot. Spins on the tail itself, which is one line transfer less than on the
  // bell; sleeps on the bell, whose value is the tail, so the next slot is head + 1.
  bool wait(std::uint64_t timeout_ns, std::uint32_t spin_us) {
    const std::uint64_t start = now_ns();
    const std::uint64_t spin_ns = std::min(timeout_ns, std::uint64_t{spin_us} * 1000);
    const std::byte* next = ring_slot(ring_, load_relaxed(&ring_->head));
    std::uint64_t waited = 0;
    do {
      for (int i = 0; i < (spin_ns != 0 ? 32 : 1); ++i) {
        if (front() != nullptr) return true;
        __builtin_prefetch(next);  // the slot's line travels with the tail's, not after it
        spin_pause();
      }
      waited = now_ns() - start;
    } while (waited < spin_ns);
    if (waited >= timeout_ns) return false;
    ipc::wait(&ring_->bell, load_relaxed(&ring_->head) + 1, timeout_ns - waited, 0);
    return front() != nullptr;
  }

  // Drops whatever is published.
  void reset() {
    ring_->cached_tail = load_acquire(&ring_->tail);
    store_release(&ring_->head, ring_->cached_tail);
  }

 private:
  wire::RingHeader* ring_;
  RoleHold hold_;
};

}  // namespace neo::ipc
