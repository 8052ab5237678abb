#include "ipc/handoff_probe.hpp"

#include <cstring>
#include <string>

#include "ipc/clock.hpp"
#include "ipc/doorbell.hpp"
#include "ipc/errors.hpp"
#include "ipc/spsc_ring.hpp"

namespace neo::ipc {
namespace {

[[noreturn]] void throw_silent(std::uint32_t round) {
  throw NativeError("the other side of the hand-over was silent in round " + std::to_string(round));
}

void pause_us(std::uint32_t gap_us) {
  if (gap_us == 0) return;
  const timespec gap{gap_us / 1'000'000, static_cast<long>(gap_us % 1'000'000) * 1000};
  nanosleep(&gap, nullptr);
}

class RingWay {
 public:
  RingWay(wire::RingHeader* out, wire::RingHeader* in, const ProbeOptions& options)
      : options_(options), out_(out), in_(in) {}

  void send(std::uint64_t stamp) {
    // At most one message is in flight, so there is always room.
    std::memcpy(out_.acquire(), &stamp, sizeof(stamp));
    out_.publish();
  }
  // False: time is up.
  bool receive(std::uint64_t& stamp) {
    if (!in_.wait(options_.timeout_ns, options_.spin_us)) return false;
    std::memcpy(&stamp, in_.front(), sizeof(stamp));
    in_.release();
    return true;
  }

 private:
  const ProbeOptions& options_;
  Producer out_;
  Consumer in_;
};

class BellWay {
 public:
  BellWay(wire::Doorbell* out, wire::Doorbell* in, const ProbeOptions& options)
      : options_(options), out_(out), in_(in) {}

  void send(std::uint64_t stamp) { ring(out_, stamp); }
  bool receive(std::uint64_t& stamp) {
    if (!wait(in_, last_ + 1, options_.timeout_ns, options_.spin_us)) return false;
    stamp = last_ = load_acquire(&in_->value);
    return true;
  }

 private:
  const ProbeOptions& options_;
  wire::Doorbell *out_, *in_;
  std::uint64_t last_ = 0;
};

template <typename Way>
ProbeTimes play(Way way, const ProbeOptions& options) {
  ProbeTimes times;
  times.one_way.reserve(options.n);
  times.round_trip.reserve(options.ping ? options.n : 0);
  for (std::uint32_t i = 0; i < options.n; ++i) {
    std::uint64_t start = 0, stamp = 0;
    if (options.ping) {
      pause_us(options.gap_us);
      way.send(start = now_ns());
    }
    if (!way.receive(stamp)) throw_silent(i);
    const std::uint64_t now = now_ns();
    if (options.ping) {
      times.round_trip.push_back(now - start);
    } else {
      way.send(now_ns());
    }
    times.one_way.push_back(now - stamp);
  }
  return times;
}

}  // namespace

ProbeTimes probe_rings(wire::RingHeader* out, wire::RingHeader* in, const ProbeOptions& options) {
  return play(RingWay(out, in, options), options);
}

ProbeTimes probe_bells(wire::Doorbell* out, wire::Doorbell* in, const ProbeOptions& options) {
  return play(BellWay(out, in, options), options);
}

}  // namespace neo::ipc
