// Two processes pass checksummed messages through a ring, while a third kills them at random.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>

#include "check.hpp"
#include "ipc/spsc_ring.hpp"

using neo::ipc::Consumer;
using neo::ipc::load_acquire;
using neo::ipc::Producer;
using neo::wire::RingHeader;

namespace {

constexpr std::uint32_t kSlots = 8;
constexpr std::uint64_t kSlotBytes = 512;
constexpr std::uint64_t kSecond = 1'000'000'000;

// A message says which one it is, how long it is, and what its words add up to.
struct Message {
  std::uint64_t index, n_words, checksum;
  std::uint64_t words[(kSlotBytes - 24) / 8];
};
static_assert(sizeof(Message) == kSlotBytes);

std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 31;
  x *= 0x9e37'79b9'7f4a'7c15ULL;
  return x ^ x >> 29;
}

void fill(std::byte* slot, std::uint64_t index) {
  auto* message = reinterpret_cast<Message*>(slot);
  message->index = index;
  message->n_words = mix(index) % 62;
  message->checksum = 0;
  for (std::uint64_t i = 0; i < message->n_words; ++i) {
    message->words[i] = mix(index * 64 + i);
    message->checksum += message->words[i];
  }
}

void check(const std::byte* slot, std::uint64_t index) {
  const auto* message = reinterpret_cast<const Message*>(slot);
  CHECK(message->index == index);
  CHECK(message->n_words == mix(index) % 62);
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < message->n_words; ++i) {
    CHECK(message->words[i] == mix(index * 64 + i));
    sum += message->words[i];
  }
  CHECK(message->checksum == sum);
}

RingHeader* shared_ring() {
  void* memory = mmap(nullptr, sizeof(RingHeader) + kSlots * kSlotBytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  auto* ring = static_cast<RingHeader*>(memory);
  ring->n_slots = kSlots;
  ring->slot_bytes = kSlotBytes;
  return ring;
}

// Goes on where the last producer's death left the ring.
void produce(RingHeader* ring, std::uint64_t n) {
  Producer producer(ring, true);
  while (load_acquire(&ring->tail) < n) {
    std::byte* slot = producer.acquire();
    if (slot == nullptr) {
      usleep(20);
      continue;
    }
    fill(slot, load_acquire(&ring->tail));
    producer.publish();
  }
}

void consume(RingHeader* ring, std::uint64_t n, std::uint32_t spin_us) {
  Consumer consumer(ring, true);
  while (load_acquire(&ring->head) < n) {
    CHECK(consumer.wait(60 * kSecond, spin_us));
    check(consumer.front(), load_acquire(&ring->head));
    consumer.release();
  }
}

template <typename Work>
pid_t start(const Work& work) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid != 0) return pid;
  work();
  _exit(0);
}

// True: the child is over, in order.
bool is_over(pid_t pid, bool wait_for_it) {
  int status = 0;
  const pid_t found = waitpid(pid, &status, wait_for_it ? 0 : WNOHANG);
  CHECK(found == 0 || (found == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0));
  return found == pid;
}

void kill_now(pid_t pid) {
  CHECK(kill(pid, SIGKILL) == 0);
  CHECK(waitpid(pid, nullptr, 0) == pid);
}

void messages_arrive_whole_and_in_order(std::uint64_t n, std::uint32_t spin_us) {
  RingHeader* ring = shared_ring();
  const pid_t consumer = start([&] { consume(ring, n, spin_us); });
  const pid_t producer = start([&] { produce(ring, n); });
  CHECK(is_over(producer, true) && is_over(consumer, true));
  CHECK(ring->head == n && ring->tail == n);
}

// Kills one side at a time, at a random moment, and starts its successor, until all has arrived.
void messages_survive_the_death_of_either_side(std::uint64_t n, std::uint64_t seed) {
  RingHeader* ring = shared_ring();
  std::mt19937_64 random(seed);
  const auto producing = [&] { produce(ring, n); };
  const auto consuming = [&] { consume(ring, n, random() % 2 != 0 ? 50 : 0); };
  pid_t producer = start(producing), consumer = start(consuming);
  bool sent = false, received = false;
  std::uint64_t kills = 0;
  while (!sent || !received) {
    usleep(static_cast<useconds_t>(random() % 3000));
    sent = sent || is_over(producer, false);
    received = received || is_over(consumer, false);
    const bool kill_producer = random() % 2 != 0;
    if (kill_producer && !sent) {
      kill_now(producer);
      producer = start(producing);
      ++kills;
    } else if (!kill_producer && !received) {
      kill_now(consumer);
      consumer = start(consuming);
      ++kills;
    }
  }
  CHECK(ring->head == n && ring->tail == n);
  CHECK(kills > 0);
  std::printf("(%llu kills) ", static_cast<unsigned long long>(kills));
}

// NEO_STRESS_MESSAGES: how many messages each part passes.
std::uint64_t message_count() {
  const char* text = std::getenv("NEO_STRESS_MESSAGES");
  return text == nullptr ? 50'000 : std::stoull(text);
}

}  // namespace

int main() {
  const std::uint64_t n = message_count();
  that("messages arrive whole and in order", [&] { messages_arrive_whole_and_in_order(n, 0); });
  that("also where the consumer spins", [&] { messages_arrive_whole_and_in_order(n, 50); });
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    that("messages survive the death of either side",
         [&] { messages_survive_the_death_of_either_side(n, seed); });
  }
}
