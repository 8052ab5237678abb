#include <pybind11/native_enum.h>

#include <utility>

#include "bindings/bindings.hpp"
#include "ipc/atomics.hpp"
#include "ipc/errors.hpp"
#include "layout/control.hpp"
#include "layout/segment_layout.hpp"
#include "layout/sequences.hpp"

namespace neo::bindings {
namespace {

void register_dtypes(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(wire::Geometry, n_layers, n_heads, n_kv_heads, head_dim, act_dtype, kv_dtype,
                       block_size, page_size, n_pages, max_slots, max_rows, max_tokens, max_blocks,
                       max_pages, max_tasks, max_swaps, n_plans, max_workers, rank, world_size,
                       spin_us, lease_us, max_logprobs, ride_groups, ride_capacity);
  PYBIND11_NUMPY_DTYPE(wire::StepHeader, plan_id, n_rows, n_tokens, n_swaps, flags, rank);
  PYBIND11_NUMPY_DTYPE(wire::StepRow, slot, kind, start, n_new, token_at, sample, stage, place);
  PYBIND11_NUMPY_DTYPE(wire::Swap, slot, kind, n_tokens);
  PYBIND11_NUMPY_DTYPE(wire::ResultHeader, plan_id, n_rows, rank, elapsed, linear, gpu_attn,
                       cpu_wait, handoff, swap, head, cpu_tasks, n_logprobs, ride_wait);
  PYBIND11_NUMPY_DTYPE(wire::ResultRow, slot, status, token, logprob);
  PYBIND11_NUMPY_DTYPE(wire::LogprobEntry, row, position, token, logprob, rank, n_top);
  PYBIND11_NUMPY_DTYPE(wire::TokenLogprob, token, logprob);
  PYBIND11_NUMPY_DTYPE(wire::SlotParams, seed, temperature, top_p, min_p, top_k, features, n_prompt,
                       presence_penalty, frequency_penalty, repetition_penalty, n_logprobs,
                       n_prompt_logprobs, n_stop, min_len, n_biases);
  PYBIND11_NUMPY_DTYPE(wire::TokenBias, token, bias);
  PYBIND11_NUMPY_DTYPE(wire::WorkerRow, pid, state, n_threads, spawned, heartbeat_ns, busy_ns,
                       tasks, kv_bytes, stolen, lost, draining, rank);
  module.attr("geometry_dtype") = py::dtype::of<wire::Geometry>();
  module.attr("step_header_dtype") = py::dtype::of<wire::StepHeader>();
  module.attr("step_row_dtype") = py::dtype::of<wire::StepRow>();
  module.attr("swap_dtype") = py::dtype::of<wire::Swap>();
  module.attr("result_header_dtype") = py::dtype::of<wire::ResultHeader>();
  module.attr("result_row_dtype") = py::dtype::of<wire::ResultRow>();
  module.attr("slot_params_dtype") = py::dtype::of<wire::SlotParams>();
  module.attr("logprob_entry_dtype") = py::dtype::of<wire::LogprobEntry>();
  module.attr("token_logprob_dtype") = py::dtype::of<wire::TokenLogprob>();
  module.attr("token_bias_dtype") = py::dtype::of<wire::TokenBias>();
  module.attr("max_biases") = wire::kMaxBiases;
  module.attr("worker_row_dtype") = py::dtype::of<wire::WorkerRow>();
}

void bind_enums_and_errors(py::module_& module) {
  auto base = py::register_exception<NativeError>(module, "NativeError", PyExc_RuntimeError);
  py::register_exception<LayoutMismatchError>(module, "LayoutMismatchError", base);
  py::register_exception<SharedMemoryError>(module, "SharedMemoryError", base);
  py::enum_<wire::SegmentKind>(module, "SegmentKind")
      .value("CONTROL", wire::SegmentKind::control)
      .value("STEPS", wire::SegmentKind::steps)
      .value("RESULTS", wire::SegmentKind::results)
      .value("SEQUENCES", wire::SegmentKind::sequences)
      .value("WORK", wire::SegmentKind::work)
      .value("EXCHANGE", wire::SegmentKind::exchange)
      .value("CPU_CACHE", wire::SegmentKind::cpu_cache);
  py::enum_<wire::WorkerState>(module, "WorkerState")
      .value("EMPTY", wire::WorkerState::empty)
      .value("STARTING", wire::WorkerState::starting)
      .value("READY", wire::WorkerState::ready)
      .value("DRAINING", wire::WorkerState::draining);
}

// Values that numpy columns hold, in the geometry and in rows of plans and results: IntEnums.
void bind_column_enums(py::module_& module) {
  py::native_enum<wire::DType>(module, "WireDType", "enum.IntEnum")
      .value("FLOAT32", wire::DType::float32)
      .value("FLOAT16", wire::DType::float16)
      .value("BFLOAT16", wire::DType::bfloat16)
      .value("INT8", wire::DType::int8)
      .finalize();
  py::native_enum<wire::RowKind>(module, "RowKind", "enum.IntEnum")
      .value("PREFILL_GPU", wire::RowKind::prefill_gpu)
      .value("PREFILL_CPU", wire::RowKind::prefill_cpu)
      .value("DECODE_GPU", wire::RowKind::decode_gpu)
      .value("DECODE_CPU", wire::RowKind::decode_cpu)
      .value("RIDE_CPU", wire::RowKind::ride_cpu)
      .finalize();
  py::native_enum<wire::RowStatus>(module, "RowStatus", "enum.IntEnum")
      .value("COMPUTED", wire::RowStatus::computed)
      .value("SAMPLED", wire::RowStatus::sampled)
      .value("VOIDED", wire::RowStatus::voided)
      .finalize();
  py::native_enum<wire::Feature>(module, "Feature", "enum.IntFlag")
      .value("BIASES", wire::Feature::biases)
      .value("PENALTIES", wire::Feature::penalties)
      .value("LOGPROBS", wire::Feature::logprobs)
      .value("PROMPT_LOGPROBS", wire::Feature::prompt_logprobs)
      .finalize();
  py::native_enum<wire::SwapKind>(module, "SwapKind", "enum.IntEnum")
      .value("OUT", wire::SwapKind::out)
      .value("IN", wire::SwapKind::in)
      .finalize();
}

SegmentPtr create_segment(int fd, wire::SegmentKind kind, const py::array& geometry,
                          unsigned populate_threads) {
  const wire::Geometry checked = to_geometry(geometry);
  py::gil_scoped_release release;
  return layout::create_segment(fd, kind, checked, populate_threads);
}

void bind_segment(py::module_& module) {
  py::class_<ipc::Segment, SegmentPtr>(module, "Segment")
      .def_static("create", &create_segment, py::arg("fd"), py::arg("kind"), py::arg("geometry"),
                  py::arg("populate_threads") = 1)
      .def_static("attach", &ipc::Segment::attach, py::arg("fd"), py::arg("kind"),
                  py::arg("writable") = true)
      .def_property_readonly("size", &ipc::Segment::size)
      .def_property_readonly("writable", &ipc::Segment::writable)
      .def_property_readonly("address", [](const ipc::Segment& segment) {
        return reinterpret_cast<std::uintptr_t>(segment.data());
      });
}

py::array geometry_copy(const layout::Control& control) {
  return py::array(py::dtype::of<wire::Geometry>(), py::array::ShapeContainer{},
                   &control.geometry());
}

// Field by field would only tear differently: a reader may see counters of two heartbeats.
py::array worker_rows_copy(const layout::Control& control) {
  return py::array(py::dtype::of<wire::WorkerRow>(),
                   {static_cast<py::ssize_t>(control.geometry().max_workers)}, control.worker(0));
}

// Offsets in bytes from the start of each segment, for kernels of a device that reads and writes
// the segments directly.
py::dict device_layout(const py::array& geometry) {
  const wire::Geometry g = to_geometry(geometry);
  layout::validate_geometry(g);
  const layout::WorkLayout work(g);
  const layout::ExchangeLayout exchange(g);
  const layout::CacheLayout cache(g);
  py::dict at;
  at["channel"] = work.channels;
  at["channel_bytes"] = sizeof(wire::Channel);
  at["published"] = offsetof(wire::Channel, published);
  at["done"] = offsetof(wire::Channel, done);
  at["abort"] = offsetof(wire::Channel, abort);
  at["tasks"] = work.tasks;
  at["q"] = exchange.q;
  at["q_row_bytes"] = exchange.q_row_bytes;
  at["areas"] = exchange.areas;
  at["area_bytes"] = exchange.area_bytes;
  at["worker_area_bytes"] = exchange.worker_area_bytes;
  at["tiles"] = cache.tile(g, 0, 0, 0);
  at["tile_bytes"] = cache.tile_bytes;
  at["scales"] = cache.scales_at(g);
  at["ride_published"] = work.ride_queue + offsetof(wire::RideQueue, published);
  at["ride_abort"] = work.ride_queue + offsetof(wire::RideQueue, abort);
  at["ride_done"] = work.ride_done;
  at["ride_done_bytes"] = sizeof(wire::Doorbell);
  at["ride_tasks"] = layout::ride_tasks(g);  // task words of a group
  at["ride_words"] = work.tasks + layout::first_task(g, layout::ride_channel(0)) * 8;
  at["ride_q"] = exchange.q_row(g, layout::ride_channel(0), 0);
  at["ride_areas"] = exchange.area(g, 0, layout::ride_channel(0), 0);
  at["task_epoch_shift"] = wire::kTaskEpochShift;
  at["task_worker_shift"] = wire::kTaskWorkerShift;
  at["task_field_mask"] = wire::kTaskFieldMask;
  return at;
}

void bind_control(py::module_& module) {
  using layout::Control;
  py::class_<Control, std::shared_ptr<Control>>(module, "Control")
      .def(py::init<SegmentPtr>(), py::arg("segment"))
      .def_property_readonly("geometry", &geometry_copy)
      .def("worker_rows", &worker_rows_copy)
      .def("set_server_pid", &Control::set_server_pid, py::arg("pid"))
      .def_property_readonly("server_pid", [](const Control& c) { return c.server()->pid; })
      .def("set_stopping", &Control::set_stopping)
      .def_property_readonly("stopping", &Control::stopping)
      .def("clear_plans", &Control::clear_plans)
      .def_property_readonly("plans",
                             [](const Control& c) {
                               return std::make_pair(ipc::load_acquire(&c.server()->active),
                                                     ipc::load_acquire(&c.server()->device_plans));
                             })
      .def("request_drain", &Control::request_drain, py::arg("row"))
      .def("draining", &Control::draining, py::arg("row"))
      .def("take_row", &Control::take_row, py::arg("row"), py::arg("pid"), py::arg("n_threads"),
           py::arg("spawned") = false)
      .def("set_state", &Control::set_state, py::arg("row"), py::arg("state"))
      .def("clear_row", &Control::clear_row, py::arg("row"))
      .def("lease_core", &Control::lease_core, py::arg("core"), py::arg("row"))
      .def("release_cores", &Control::release_cores, py::arg("row"));
}

// A view's base is the Sequences object itself, which keeps the segment mapped.
void bind_sequences(py::module_& module) {
  using layout::Sequences;
  const auto table = [](const py::object& self, std::uint32_t* data, std::uint32_t columns) {
    const auto slots = static_cast<py::ssize_t>(self.cast<Sequences&>().geometry().max_slots);
    return view(data, {slots, static_cast<py::ssize_t>(columns)}, self);
  };
  py::class_<Sequences, std::shared_ptr<Sequences>>(module, "Sequences")
      .def(py::init([](SegmentPtr segment, const py::array& geometry) {
             return std::make_shared<Sequences>(std::move(segment), to_geometry(geometry));
           }),
           py::arg("segment"), py::arg("geometry"))
      .def_property_readonly("params",
                             [](const py::object& self) {
                               auto& s = self.cast<Sequences&>();
                               const auto n = static_cast<py::ssize_t>(s.geometry().max_slots);
                               return view(s.params(), {n}, self);
                             })
      .def_property_readonly("block_table",
                             [table](const py::object& self) {
                               auto& s = self.cast<Sequences&>();
                               return table(self, s.block_table(), s.geometry().max_blocks);
                             })
      .def_property_readonly("page_table",
                             [table](const py::object& self) {
                               auto& s = self.cast<Sequences&>();
                               return table(self, s.page_table(), s.geometry().max_pages);
                             })
      .def_property_readonly("bias", [](const py::object& self) {
        auto& s = self.cast<Sequences&>();
        const auto slots = static_cast<py::ssize_t>(s.geometry().max_slots);
        return view(s.bias(), {slots, py::ssize_t{wire::kMaxBiases}}, self);
      });
}

}  // namespace

void bind_layout(py::module_& module) {
  module.attr("Array") = py::module_::import("numpy").attr("ndarray");  // the stub's alias
  register_dtypes(module);
  bind_enums_and_errors(module);
  bind_column_enums(module);
  bind_segment(module);
  bind_control(module);
  bind_sequences(module);
  module.def("device_layout", &device_layout, py::arg("geometry"));
  module.def(
      "validate_geometry",
      [](const py::array& geometry) { layout::validate_geometry(to_geometry(geometry)); },
      py::arg("geometry"));
  module.def(
      "segment_bytes",
      [](const py::array& geometry, wire::SegmentKind kind) {
        const wire::Geometry checked = to_geometry(geometry);
        layout::validate_geometry(checked);
        return layout::segment_bytes(checked, kind);
      },
      py::arg("geometry"), py::arg("kind"));
}

}  // namespace neo::bindings
