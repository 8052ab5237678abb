#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ipc/spsc_ring.hpp"

using neo::NativeError;
using neo::ipc::Consumer;
using neo::ipc::Producer;
using neo::wire::RingHeader;

namespace {

// A ring in private memory. `start` forges the index at which it stands.
struct Ring {
  explicit Ring(std::uint32_t n_slots, std::uint64_t slot_bytes = 64, std::uint64_t start = 0)
      : memory((sizeof(RingHeader) + n_slots * slot_bytes) / 64 + 1) {
    header = reinterpret_cast<RingHeader*>(memory.data());
    header->n_slots = n_slots;
    header->slot_bytes = slot_bytes;
    header->head = header->tail = start;
  }
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> memory;
  RingHeader* header;
};

void put(std::byte* slot, std::uint64_t value) { std::memcpy(slot, &value, sizeof(value)); }

std::uint64_t get(const std::byte* slot) {
  std::uint64_t value;
  std::memcpy(&value, slot, sizeof(value));
  return value;
}

void a_full_ring_refuses_and_keeps_what_it_has() {
  Ring ring(3);
  Producer producer(ring.header);
  Consumer consumer(ring.header);
  for (std::uint64_t i = 0; i < 3; ++i) {
    put(producer.acquire(), i);
    producer.publish();
  }
  CHECK(producer.acquire() == nullptr);
  for (std::uint64_t i = 0; i < 3; ++i) {
    CHECK(get(consumer.front()) == i);
    consumer.release();
  }
  CHECK(consumer.front() == nullptr);
  CHECK(producer.acquire() != nullptr);
}

void an_acquired_slot_is_not_seen_before_it_is_published() {
  Ring ring(2);
  Producer producer(ring.header);
  Consumer consumer(ring.header);
  put(producer.acquire(), 1);
  CHECK(consumer.front() == nullptr);
  CHECK(!consumer.wait(1000, 0));
  producer.publish();
  CHECK(get(consumer.front()) == 1);
}

void indices_wrap_around_unnoticed(std::uint64_t start) {
  Ring ring(4, 64, start);
  Producer producer(ring.header);
  Consumer consumer(ring.header);
  std::uint64_t sent = 0, received = 0;
  while (received < 40) {
    while (std::byte* slot = producer.acquire()) {
      put(slot, sent++);
      producer.publish();
    }
    CHECK(sent - received == 4);
    for (int i = 0; i < 3; ++i) {
      CHECK(get(consumer.front()) == received++);
      consumer.release();
    }
  }
}

void roles_are_held_by_one_living_object() {
  Ring ring(2);
  auto first = std::make_unique<Producer>(ring.header);
  CHECK(throws<NativeError>([&] { Producer second(ring.header); }));
  CHECK(throws<NativeError>([&] { Producer second(ring.header, true); }));
  first.reset();
  Producer second(ring.header);
  Consumer consumer(ring.header);
  CHECK(throws<NativeError>([&] { second.reset(); }));
}

void a_role_of_a_process_that_is_gone_is_taken_over() {
  Ring ring(2);
  ring.header->producer_pid = 0x7fff'fff0;  // above every pid_max
  Producer producer(ring.header);
  CHECK(ring.header->producer_pid == static_cast<std::uint32_t>(getpid()));
}

// Every word of a slot carries the item's number, so that a slot read too early shows.
void a_million_items_arrive_in_order_and_whole() {
  constexpr std::uint64_t kItems = 1'000'000, kWords = 16;
  Ring ring(8, kWords * 8);
  Producer producer(ring.header);
  Consumer consumer(ring.header);
  std::thread sender([&] {
    for (std::uint64_t i = 0; i < kItems; ++i) {
      std::byte* slot;
      while ((slot = producer.acquire()) == nullptr) std::this_thread::yield();
      for (std::uint64_t w = 0; w < kWords; ++w) put(slot + 8 * w, i);
      producer.publish();
    }
  });
  for (std::uint64_t i = 0; i < kItems; ++i) {
    CHECK(consumer.wait(60'000'000'000, 20));
    for (std::uint64_t w = 0; w < kWords; ++w) CHECK(get(consumer.front() + 8 * w) == i);
    consumer.release();
  }
  sender.join();
  CHECK(consumer.front() == nullptr);
}

}  // namespace

int main() {
  that("a full ring refuses and keeps what it has", a_full_ring_refuses_and_keeps_what_it_has);
  that("an acquired slot is not seen before it is published",
       an_acquired_slot_is_not_seen_before_it_is_published);
  that("indices wrap around at 2^32", [] { indices_wrap_around_unnoticed((1ULL << 32) - 6); });
  that("indices wrap around at 2^64", [] { indices_wrap_around_unnoticed(~0ULL - 6); });
  that("roles are held by one living object", roles_are_held_by_one_living_object);
  that("a role of a process that is gone is taken over",
       a_role_of_a_process_that_is_gone_is_taken_over);
  that("a million items arrive in order and whole", a_million_items_arrive_in_order_and_whole);
}
