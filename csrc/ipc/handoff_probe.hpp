// Measures hand-overs between two processes: one plays ping, the other pong.
//
//   ping   stamp ──▶ ring / bell ──▶ pong takes it: now - stamp is the one-way time
//   pong   stamp ──▶ ring / bell ──▶ ping takes it, likewise; ping also has the round trip
//
// Stamps are CLOCK_MONOTONIC, which is one clock for all cores of a host. A one-way time includes
// one reading of that clock (some 20 ns). For benchmarks; what runs is the code of the rings and
// doorbells themselves.
#pragma once

#include <cstdint>
#include <vector>

#include "protos/wire.hpp"

namespace neo::ipc {

struct ProbeOptions {
  bool ping;
  std::uint32_t n;           // round trips
  std::uint32_t spin_us;     // how long a waiter spins before it sleeps
  std::uint32_t gap_us;      // ping's pause before each round trip, so that pong falls asleep
  std::uint64_t timeout_ns;  // of one wait: the other side is gone
};

// Nanoseconds, n of each (of ping's round trips only where this side is ping).
struct ProbeTimes {
  std::vector<std::uint64_t> one_way;
  std::vector<std::uint64_t> round_trip;
};

// `out`: the ring this side produces into; `in`: the one it consumes. Throws NativeError when the
// other side is silent for longer than the timeout.
ProbeTimes probe_rings(wire::RingHeader* out, wire::RingHeader* in, const ProbeOptions& options);

// Likewise for doorbells. The epochs are the stamps: both only grow.
ProbeTimes probe_bells(wire::Doorbell* out, wire::Doorbell* in, const ProbeOptions& options);

}  // namespace neo::ipc
