// Atomic access to plain integers that other processes map too.
//
// std::atomic over shared memory is not guaranteed to have the layout of the integer inside it, and
// wire.hpp must stay plain data; these wrappers over the compiler's builtins are lock-free for the
// 4- and 8-byte words used here, on every platform the project builds for.
#pragma once

#include <cstdint>

namespace neo::ipc {

template <typename T>
inline T load_relaxed(const T* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

template <typename T>
inline T load_acquire(const T* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

template <typename T>
inline void store_relaxed(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

template <typename T>
inline void store_release(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

template <typename T>
inline void store_seq_cst(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

// Orders this thread's earlier stores before its later loads, for the two-sided handshakes
// (doorbell, sibling table, last finisher) where acquire and release are not enough.
inline void full_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline void acquire_fence() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

inline void release_fence() { __atomic_thread_fence(__ATOMIC_RELEASE); }

// Sequentially consistent. On failure `expected` holds the value found.
template <typename T>
inline bool cas(T* word, T& expected, T desired) {
  return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST);
}

// Returns the value before.
template <typename T>
inline T add(T* word, T amount) {
  return __atomic_fetch_add(word, amount, __ATOMIC_SEQ_CST);
}

template <typename T>
inline T sub(T* word, T amount) {
  return __atomic_fetch_sub(word, amount, __ATOMIC_SEQ_CST);
}

// Raises `word` to `value`; never lowers it. True: this call raised it.
template <typename T>
inline bool max_store(T* word, T value) {
  T seen = load_relaxed(word);
  while (seen < value) {
    if (cas(word, seen, value)) return true;
  }
  return false;
}

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

}  // namespace neo::ipc
