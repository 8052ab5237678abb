// A task word, packed and unpacked.
//
//   63                                   20 19   18 17        9 8         0
//   ├──────────────── epoch ───────────────┼ state ─┼ worker ──┼─ thread ──┤
#pragma once

#include <cstdint>

#include "protos/wire.hpp"

namespace neo::layout {

struct TaskWord {
  std::uint64_t epoch;
  wire::TaskState state;
  std::uint32_t worker;
  std::uint32_t thread;
};

constexpr std::uint64_t pack(const TaskWord& word) {
  return word.epoch << wire::kTaskEpochShift |
         static_cast<std::uint64_t>(word.state) << wire::kTaskStateShift |
         static_cast<std::uint64_t>(word.worker & wire::kTaskFieldMask) << wire::kTaskWorkerShift |
         (word.thread & wire::kTaskFieldMask);
}

constexpr TaskWord unpack(std::uint64_t bits) {
  return {bits >> wire::kTaskEpochShift,
          static_cast<wire::TaskState>(bits >> wire::kTaskStateShift & 3),
          static_cast<std::uint32_t>(bits >> wire::kTaskWorkerShift & wire::kTaskFieldMask),
          static_cast<std::uint32_t>(bits & wire::kTaskFieldMask)};
}

static_assert(unpack(pack({77, wire::TaskState::finished, 5, 300})).thread == 300);
static_assert(unpack(pack({77, wire::TaskState::finished, 5, 300})).epoch == 77);

}  // namespace neo::layout
