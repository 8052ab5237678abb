// CLOCK_MONOTONIC in nanoseconds: the same clock in every process of a host.
#pragma once

#include <cstdint>
#include <ctime>

namespace neo::ipc {

inline std::uint64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000ULL +
         static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace neo::ipc
