// Reads what the cpu workers made of one row of a job, and merges it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "layout/work.hpp"

namespace neo::offload {

class Collector {
 public:
  Collector(layout::Work work, std::shared_ptr<ipc::Segment> exchange,
            const wire::Geometry& geometry);

  // out: [n_heads][head_dim] in act_dtype. Throws NativeError unless every task of the row is
  // finished in this epoch.
  void collect(std::uint32_t channel, std::uint64_t epoch, const wire::WorkRow& row,
               std::byte* out);

 private:
  void collect_head(std::uint32_t channel, std::uint64_t epoch, const wire::WorkRow& row,
                    std::uint32_t kv_head, std::byte* out);

  layout::Work work_;
  std::shared_ptr<ipc::Segment> exchange_;
  wire::Geometry geometry_;
  layout::ExchangeLayout layout_;
  std::vector<float> merged_;  // [group][head_dim]
};

}  // namespace neo::offload
