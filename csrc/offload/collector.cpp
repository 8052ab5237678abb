#include "offload/collector.hpp"

#include <string>

#include "ipc/errors.hpp"
#include "layout/elements.hpp"
#include "layout/task_word.hpp"
#include "offload/merge.hpp"

namespace neo::offload {

Collector::Collector(layout::Work work, std::shared_ptr<ipc::Segment> exchange,
                     const wire::Geometry& geometry)
    : work_(std::move(work)),
      exchange_(std::move(exchange)),
      geometry_(geometry),
      layout_(geometry),
      merged_(std::size_t{layout::group_size(geometry)} * geometry.head_dim) {}

void Collector::collect_head(std::uint32_t channel, std::uint64_t epoch, const wire::WorkRow& row,
                             std::uint32_t kv_head, std::byte* out) {
  const std::uint32_t group = layout::group_size(geometry_);
  std::vector<Partial> partials;
  for (std::uint32_t split = 0; split < row.n_splits; ++split) {
    const std::uint32_t task = row.first_task + kv_head * row.n_splits + split;
    const auto word = layout::unpack(ipc::load_acquire(work_.task(channel, task)));
    if (word.epoch != epoch || word.state != wire::TaskState::finished ||
        word.worker >= geometry_.max_workers) {
      throw NativeError("task " + std::to_string(task) + " of a job that is done has epoch " +
                        std::to_string(word.epoch) + " and state " +
                        std::to_string(static_cast<std::uint32_t>(word.state)));
    }
    const std::byte* area = exchange_->data() + layout_.area(geometry_, word.worker, channel, task);
    partials.push_back(Partial::at(area, group, geometry_.head_dim));
  }
  merge(partials, group, geometry_.head_dim, merged_.data());
  layout::from_floats(merged_.data(), out, static_cast<wire::DType>(geometry_.act_dtype),
                      merged_.size());
}

void Collector::collect(std::uint32_t channel, std::uint64_t epoch, const wire::WorkRow& row,
                        std::byte* out) {
  const std::size_t head_bytes = merged_.size() * layout::element_size(geometry_.act_dtype);
  for (std::uint32_t kv_head = 0; kv_head < geometry_.n_kv_heads; ++kv_head) {
    collect_head(channel, epoch, row, kv_head, out + kv_head * head_bytes);
  }
}

}  // namespace neo::offload
