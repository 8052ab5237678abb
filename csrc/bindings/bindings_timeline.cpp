#include <pybind11/native_enum.h>

#include "bindings/bindings.hpp"
#include "protos/timeline.hpp"

namespace neo::bindings {

void bind_timeline(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(wire::TimelineHeader, magic, first_plan, last_plan, on, n_lanes, n_spans,
                       next_lane);
  PYBIND11_NUMPY_DTYPE(wire::LaneHeader, count, pid, worker, thread);
  PYBIND11_NUMPY_DTYPE(wire::Span, begin_ns, end_ns, plan_id, bytes, kind, layer, channel, slot,
                       kv_head, split, tokens, tasks);
  module.attr("timeline_header_dtype") = py::dtype::of<wire::TimelineHeader>();
  module.attr("lane_header_dtype") = py::dtype::of<wire::LaneHeader>();
  module.attr("span_dtype") = py::dtype::of<wire::Span>();
  module.attr("timeline_magic") = wire::kTimelineMagic;
  module.attr("device_lane") = wire::kDeviceLane;
  module.attr("first_cpu_lane") = wire::kFirstCpuLane;
  py::native_enum<wire::SpanKind>(module, "SpanKind", "enum.IntEnum")
      .value("ITERATION", wire::SpanKind::iteration)
      .value("LINEAR", wire::SpanKind::linear)
      .value("HANDOFF", wire::SpanKind::handoff)
      .value("GPU_ATTN", wire::SpanKind::gpu_attn)
      .value("CPU_WAIT", wire::SpanKind::cpu_wait)
      .value("COLLECT", wire::SpanKind::collect)
      .value("SWAP", wire::SpanKind::swap)
      .value("HEAD", wire::SpanKind::head)
      .value("ATTEND", wire::SpanKind::attend)
      .finalize();
}

}  // namespace neo::bindings
