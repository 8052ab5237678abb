// The timeline segment: what every thread did during a few iterations, for `--trace-timeline`.
// There is one only while a timeline is asked for. Written by whoever owns the lane; read by the
// server once the iterations are over.
//
//   TimelineHeader, LaneHeader[n_lanes], Span[n_lanes][n_spans]
//
// All times are CLOCK_MONOTONIC, which is one clock for all processes of a host; spans of a device
// are mapped to it by whoever writes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace neo::wire {

inline constexpr std::uint64_t kTimelineMagic = 0x3130'4c54'4f45'4eULL;  // "NEOTL01", little endian
inline constexpr std::uint32_t kDeviceLane = 1;    // of the gpu worker; its host thread has lane 0
inline constexpr std::uint32_t kFirstCpuLane = 2;  // lanes from here on are taken by cpu threads

enum class SpanKind : std::uint32_t {
  iteration = 0,
  linear = 1,
  handoff = 2,  // stores of K and V, and the publish
  gpu_attn = 3,
  cpu_wait = 4,
  collect = 5,
  swap = 6,
  head = 7,
  attend = 8,  // one attention task of a cpu worker
};

struct alignas(64) TimelineHeader {
  std::uint64_t magic;
  std::uint64_t first_plan;  // spans of plans [first_plan, last_plan) are kept
  std::uint64_t last_plan;
  std::uint32_t on;  // [atomic] 1: cpu workers record; by the gpu worker, who knows the plan
  std::uint32_t n_lanes;
  std::uint32_t n_spans;    // of a lane
  std::uint32_t next_lane;  // [atomic] taken by addition; past n_lanes there is none left
  std::uint8_t reserved[24];
};

struct alignas(64) LaneHeader {
  std::uint64_t count;   // [atomic] spans ever written; span i lies at i % n_spans
  std::int32_t pid;      // 0: nobody's lane
  std::uint32_t worker;  // row of the worker table
  std::uint32_t thread;
  std::uint8_t reserved[44];
};

// What a kind does not use is 0.
struct alignas(64) Span {
  std::uint64_t begin_ns;
  std::uint64_t end_ns;
  std::uint64_t plan_id;  // of the gpu worker's spans
  std::uint64_t bytes;    // of K and V that a task read
  std::uint32_t kind;     // SpanKind
  std::uint32_t layer;
  std::uint32_t channel;
  std::uint32_t slot;
  std::uint32_t kv_head;
  std::uint32_t split;
  std::uint32_t tokens;  // of the task's sequence
  std::uint32_t tasks;   // of an iteration, over all layers
};

static_assert(sizeof(TimelineHeader) == 64 && sizeof(LaneHeader) == 64 && sizeof(Span) == 64);
static_assert(std::is_trivially_copyable_v<Span> && std::is_standard_layout_v<Span>);
static_assert(offsetof(TimelineHeader, on) == 24 && offsetof(LaneHeader, worker) == 12);
static_assert(offsetof(Span, kind) == 32);

}  // namespace neo::wire
