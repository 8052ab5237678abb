#include <utility>
#include <vector>

#include "attn/paged_attention.hpp"
#include "attn/read_ceiling.hpp"
#include "attn_worker/task_runner.hpp"
#include "bindings/arrays.hpp"
#include "layout/elements.hpp"
#include "layout/sequences.hpp"
#include "offload/cpu_cache.hpp"
#include "offload/merge.hpp"

namespace neo::bindings {
namespace {

using attn_worker::TaskRunner;
using offload::CpuCache;

struct KvArrays {
  std::size_t n;
  std::byte *k, *v;
};

KvArrays kv_rows(const CpuCache& cache, const py::array& k, const py::array& v, bool writable) {
  const wire::Geometry& g = cache.geometry();
  const py::ssize_t n = k.ndim() == 3 ? k.shape(0) : -1;
  const std::vector<py::ssize_t> shape{n, g.n_kv_heads, g.head_dim};
  return {static_cast<std::size_t>(n < 0 ? 0 : n), act_data(k, "k", shape, g.act_dtype, writable),
          act_data(v, "v", shape, g.act_dtype, writable)};
}

void store_rows(CpuCache& cache, std::uint32_t layer, const py::array& slots,
                const py::array& positions, const py::array& k, const py::array& v) {
  const KvArrays rows = kv_rows(cache, k, v, false);
  const auto n = static_cast<py::ssize_t>(rows.n);
  const std::uint32_t* slot_data = index_data(slots, "slots", n);
  const std::uint32_t* position_data = index_data(positions, "positions", n);
  py::gil_scoped_release release;
  cache.store_rows(layer, slot_data, position_data, rows.n, rows.k, rows.v);
}

void store_span(CpuCache& cache, std::uint32_t layer, std::uint32_t slot, std::uint32_t start,
                const py::array& k, const py::array& v) {
  const KvArrays rows = kv_rows(cache, k, v, false);
  py::gil_scoped_release release;
  cache.store_span(layer, slot, start, rows.n, rows.k, rows.v);
}

void load_span(const CpuCache& cache, std::uint32_t layer, std::uint32_t slot, std::uint32_t start,
               const py::array& k, const py::array& v) {
  const KvArrays rows = kv_rows(cache, k, v, true);
  py::gil_scoped_release release;
  cache.load_span(layer, slot, start, rows.n, rows.k, rows.v);
}

void attend_row(TaskRunner& runner, const CpuCache& cache, attn_worker::Task task,
                const std::byte* q_row, std::byte* out_row) {
  const wire::Geometry& g = cache.geometry();
  const std::uint32_t group = layout::group_size(g);
  const std::size_t head_elements = std::size_t{group} * g.head_dim;
  std::vector<std::vector<float>> areas(task.n_splits,
                                        std::vector<float>(head_elements + 2 * group));
  std::vector<float> merged(head_elements);
  for (task.kv_head = 0; task.kv_head < g.n_kv_heads; ++task.kv_head) {
    std::vector<offload::Partial> partials;
    for (task.split = 0; task.split < task.n_splits; ++task.split) {
      auto* area = reinterpret_cast<std::byte*>(areas[task.split].data());
      attn_worker::Task next = task;
      next.kv_head += (task.split + 1) / task.n_splits;
      next.split = (task.split + 1) % task.n_splits;
      if (runner.run(task, q_row, area, &next) == 0) {
        throw std::out_of_range(
            "slot " + std::to_string(task.slot) + " with seq_len " + std::to_string(task.seq_len) +
            " and n_splits " + std::to_string(task.n_splits) +
            " does not fit its pages, or layer " + std::to_string(task.layer) + " is out of range");
      }
      partials.push_back(offload::Partial::at(area, group, g.head_dim));
    }
    offload::merge(partials, group, g.head_dim, merged.data());
    const std::size_t at = task.kv_head * head_elements * layout::element_size(g.act_dtype);
    layout::from_floats(merged.data(), out_row + at, static_cast<wire::DType>(g.act_dtype),
                        head_elements);
  }
}

py::array attend(const py::array& q, const CpuCache& cache, std::uint32_t layer,
                 const py::array& slots, const py::array& seq_lens, const std::string& isa,
                 std::uint32_t n_splits) {
  const wire::Geometry& g = cache.geometry();
  if (n_splits == 0) throw std::invalid_argument("n_splits is 0; it must be at least 1");
  const py::ssize_t n = q.ndim() == 3 ? q.shape(0) : -1;
  const std::byte* q_data = act_data(q, "q", {n, g.n_heads, g.head_dim}, g.act_dtype, false);
  const std::uint32_t* slot_data = index_data(slots, "slots", n);
  const std::uint32_t* len_data = index_data(seq_lens, "seq_lens", n);
  py::array out(q.dtype(), std::vector<py::ssize_t>{n, g.n_heads, g.head_dim});
  auto* out_data = static_cast<std::byte*>(out.mutable_data());
  const std::size_t row = std::size_t{g.n_heads} * g.head_dim * layout::element_size(g.act_dtype);
  py::gil_scoped_release release;
  TaskRunner runner(cache, attn::select_variant(isa.c_str()).kernel);
  for (py::ssize_t i = 0; i < n; ++i) {
    attend_row(runner, cache, {layer, slot_data[i], len_data[i], 0, 0, n_splits}, q_data + i * row,
               out_data + i * row);
  }
  return out;
}

py::dict read_ceiling(const ipc::Segment& segment, unsigned threads) {
  if (threads == 0) throw std::invalid_argument("threads is 0; it must be at least 1");
  std::vector<std::pair<std::string, double>> rates;
  {
    py::gil_scoped_release release;
    rates = attn::read_ceiling(segment.data(), segment.size(), threads);
  }
  py::dict by_pattern;
  for (const auto& [name, rate] : rates) by_pattern[py::str(name)] = rate;
  return by_pattern;
}

std::vector<std::string> isa_variants() {
  std::vector<std::string> names;
  for (const attn::Variant& variant : attn::variants()) {
    if (variant.runnable()) names.emplace_back(variant.name);
  }
  return names;
}

}  // namespace

void bind_attention(py::module_& module) {
  using SequencesPtr = std::shared_ptr<layout::Sequences>;
  py::class_<CpuCache, std::shared_ptr<CpuCache>>(module, "CpuCache")
      .def(py::init([](SegmentPtr segment, SequencesPtr sequences, const py::array& geometry,
                       unsigned threads) {
             return std::make_shared<CpuCache>(std::move(segment), std::move(sequences),
                                               to_geometry(geometry), threads);
           }),
           py::arg("segment"), py::arg("sequences"), py::arg("geometry"), py::arg("threads") = 1)
      .def("store_rows", &store_rows, py::arg("layer"), py::arg("slots"), py::arg("positions"),
           py::arg("k"), py::arg("v"))
      .def("store_span", &store_span, py::arg("layer"), py::arg("slot"), py::arg("start"),
           py::arg("k"), py::arg("v"))
      .def("load_span", &load_span, py::arg("layer"), py::arg("slot"), py::arg("start"),
           py::arg("k"), py::arg("v"));
  module.def("attend", &attend, py::arg("q"), py::arg("cache"), py::arg("layer"), py::arg("slots"),
             py::arg("seq_lens"), py::arg("isa") = "auto", py::arg("n_splits") = 1);
  module.def("read_ceiling", &read_ceiling, py::arg("segment"), py::arg("threads"));
  module.def("isa_variants", &isa_variants);
  module.def("active_isa", [] { return std::string(attn::select_variant("auto").name); });
}

}  // namespace neo::bindings
