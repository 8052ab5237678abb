// Which task each thread of this process is inside of.
//
// An output area belongs to a process and a task index, not to an epoch. A thread that was stopped
// inside task t, lost its claim and is still writing would tear the result of a sibling that
// claimed task t of a later epoch. So a thread may claim task t only while no sibling is inside a
// task t of the same channel, whatever its epoch. Other processes have areas of their own.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace neo::attn_worker {

class Siblings {
 public:
  explicit Siblings(std::uint32_t n_threads) : inside_(n_threads) {}

  // Announce first, look second, both sequentially consistent: of two siblings that enter the same
  // task at once at least one sees the other. False: someone is (or may be) inside.
  bool enter(std::uint32_t thread, std::uint32_t channel, std::uint32_t task) {
    const std::uint64_t key = (std::uint64_t{channel} + 1) << 32 | task;
    inside_[thread].key.store(key, std::memory_order_seq_cst);
    for (std::uint32_t other = 0; other < inside_.size(); ++other) {
      if (other != thread && inside_[other].key.load(std::memory_order_seq_cst) == key) {
        leave(thread);
        return false;
      }
    }
    return true;
  }

  void leave(std::uint32_t thread) { inside_[thread].key.store(0, std::memory_order_release); }

 private:
  struct alignas(64) Inside {
    std::atomic<std::uint64_t> key{0};
  };
  std::vector<Inside> inside_;
};

}  // namespace neo::attn_worker
