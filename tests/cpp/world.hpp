// The whole hand-over in one process: an exchange and workers over segments in private files.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "attn_worker/attention_worker.hpp"
#include "check.hpp"
#include "offload/exchange.hpp"

namespace world {

using neo::attn_worker::AttentionWorker;
using neo::layout::Control;
using neo::offload::Exchange;
using neo::wire::Geometry;
using neo::wire::SegmentKind;
using SegmentPtr = std::shared_ptr<neo::ipc::Segment>;

inline constexpr std::uint64_t kMinute = 60'000'000'000;

// Three layers, four slots of 32 tokens. `ride_capacity` 0: no riders.
inline Geometry small_geometry(std::uint32_t lease_us, std::uint32_t ride_capacity) {
  Geometry g{};
  g.n_layers = 3;
  g.n_heads = 4;
  g.n_kv_heads = 2;
  g.head_dim = 16;
  g.block_size = 16;
  g.page_size = 8;
  g.n_pages = 16;
  g.max_slots = 4;
  g.max_rows = 16;
  g.max_tokens = 16;
  g.max_blocks = 4;
  g.max_pages = 4;
  g.max_tasks = 32;
  g.n_plans = 2;
  g.max_workers = 4;
  g.world_size = 1;
  g.lease_us = lease_us;
  g.ride_groups = ride_capacity != 0 ? g.n_layers + 1 : 0;
  g.ride_capacity = ride_capacity;
  return g;
}

inline SegmentPtr make(SegmentKind kind, const Geometry& g) {
  const int fd = memfd_create("neo-test", MFD_CLOEXEC);
  CHECK(fd >= 0);
  auto segment = neo::layout::create_segment(fd, kind, g, 1);
  close(fd);
  return segment;
}

// V of every token of a slot is the slot's number + 1, so attention over it gives that number.
struct World {
  explicit World(std::uint32_t lease_us = 20'000, std::uint32_t ride_capacity = 0)
      : g(small_geometry(lease_us, ride_capacity)),
        control(std::make_shared<Control>(make(SegmentKind::control, g))),
        work_segment(make(SegmentKind::work, g)),
        exchange_segment(make(SegmentKind::exchange, g)),
        cache_segment(make(SegmentKind::cpu_cache, g)),
        sequences_segment(make(SegmentKind::sequences, g)),
        work(work_segment, g) {
    auto sequences = std::make_shared<neo::layout::Sequences>(sequences_segment, g);
    neo::offload::CpuCache cache(cache_segment, sequences, g);
    for (std::uint32_t slot = 0; slot < 4; ++slot) {
      for (std::uint32_t page = 0; page < 4; ++page) {
        sequences->page_table()[slot * 4 + page] = slot * 4 + page;
      }
      const std::vector<float> rows(32 * 2 * 16, static_cast<float>(slot + 1));
      const auto* bytes = reinterpret_cast<const std::byte*>(rows.data());
      for (std::uint32_t layer = 0; layer < 3; ++layer) {
        cache.store_span(layer, slot, 0, 32, bytes, bytes);
      }
    }
  }
  std::unique_ptr<AttentionWorker> worker(std::uint32_t row, std::uint32_t threads) {
    auto made = std::make_unique<AttentionWorker>(
        neo::attn_worker::WorkerSegments{control, work_segment, exchange_segment, cache_segment,
                                         sequences_segment},
        neo::attn_worker::WorkerOptions{row, threads, {}, ""});
    made->start();
    return made;
  }
  std::unique_ptr<Exchange> exchange() {
    return std::make_unique<Exchange>(control, work_segment, exchange_segment, g);
  }

  Geometry g;
  std::shared_ptr<Control> control;
  SegmentPtr work_segment, exchange_segment, cache_segment, sequences_segment;
  neo::layout::Work work;
};

}  // namespace world
