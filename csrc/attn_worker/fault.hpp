// Fault injection, for tests only: a worker that kills or stops itself at a chosen point.
//
//   POINT=ACTION@N     the N-th time (from 1) that any thread of this process reaches POINT
//
//   point      claimed    the task word is ours, nothing computed
//              computing  the output area holds half a result
//              written    the result is written, not published
//              finished   the task word says finished; `done` not yet stored
//   action     kill       SIGKILL to this process
//              stop       SIGSTOP to this process; goes on where it was after SIGCONT
#pragma once

#include <signal.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace neo::attn_worker {

enum class FaultPoint { none, claimed, computing, written, finished };

class Fault {
 public:
  // Empty: none. Throws std::invalid_argument.
  explicit Fault(const std::string& text) {
    if (text.empty()) return;
    const std::size_t equals = text.find('='), at = text.find('@');
    if (equals == std::string::npos || at == std::string::npos || at < equals) fail(text);
    point_ = parse_point(text.substr(0, equals), text);
    const std::string action = text.substr(equals + 1, at - equals - 1);
    if (action != "kill" && action != "stop") fail(text);
    signal_ = action == "kill" ? SIGKILL : SIGSTOP;
    char* end = nullptr;
    remaining_ = std::strtoll(text.c_str() + at + 1, &end, 10);
    if (*end != '\0' || remaining_ <= 0) fail(text);
  }

  // True: this is the moment.
  bool due(FaultPoint point) {
    return point == point_ && remaining_.fetch_sub(1, std::memory_order_relaxed) == 1;
  }
  // To this thread, which takes it on return from the call: sent to the process, it might first be
  // another thread's, and this one would run on past the point.
  void fire() const { raise(signal_); }
  void reach(FaultPoint point) {
    if (due(point)) fire();
  }

 private:
  [[noreturn]] static void fail(const std::string& text) {
    throw std::invalid_argument("fault is " + text +
                                "; it must be POINT=ACTION@N with POINT claimed, computing, "
                                "written or finished, ACTION kill or stop, N from 1");
  }
  static FaultPoint parse_point(const std::string& name, const std::string& text) {
    if (name == "claimed") return FaultPoint::claimed;
    if (name == "computing") return FaultPoint::computing;
    if (name == "written") return FaultPoint::written;
    if (name == "finished") return FaultPoint::finished;
    fail(text);
  }

  FaultPoint point_ = FaultPoint::none;
  int signal_ = 0;
  std::atomic<std::int64_t> remaining_{0};
};

}  // namespace neo::attn_worker
