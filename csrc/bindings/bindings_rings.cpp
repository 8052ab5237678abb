#include <utility>

#include "bindings/bindings.hpp"
#include "ipc/handoff_probe.hpp"
#include "ipc/spsc_ring.hpp"
#include "layout/segment_layout.hpp"
#include "layout/work.hpp"

namespace neo::bindings {
namespace {

wire::RingHeader* ring_of(const SegmentPtr& segment) {
  return reinterpret_cast<wire::RingHeader*>(segment->data() + sizeof(wire::SegmentHeader));
}

struct StepSlot {
  py::array header, rows, swaps, tokens;
};

struct ResultSlot {
  py::array header, rows, logprobs, top;
};

template <typename T>
T* at(std::byte* slot, std::uint64_t offset) {
  return reinterpret_cast<T*>(slot + offset);
}

struct StepRing {
  static constexpr wire::SegmentKind kKind = wire::SegmentKind::steps;
  using Slot = StepSlot;

  static Slot slot(std::byte* data, const wire::Geometry& g, const py::object& owner) {
    const layout::StepLayout where(g);
    return {view(at<wire::StepHeader>(data, 0), {}, owner),
            view(at<wire::StepRow>(data, where.rows), {py::ssize_t{g.max_rows}}, owner),
            view(at<wire::Swap>(data, where.swaps), {py::ssize_t{g.max_swaps}}, owner),
            view(at<std::int32_t>(data, where.tokens), {py::ssize_t{g.max_tokens}}, owner)};
  }
};

struct ResultRing {
  static constexpr wire::SegmentKind kKind = wire::SegmentKind::results;
  using Slot = ResultSlot;

  static Slot slot(std::byte* data, const wire::Geometry& g, const py::object& owner) {
    const layout::ResultLayout where(g);
    const auto entries = static_cast<py::ssize_t>(where.n_logprobs);
    const auto alternatives = static_cast<py::ssize_t>(g.max_logprobs);
    return {view(at<wire::ResultHeader>(data, 0), {}, owner),
            view(at<wire::ResultRow>(data, where.rows), {py::ssize_t{g.max_rows}}, owner),
            view(at<wire::LogprobEntry>(data, where.logprobs), {entries}, owner),
            view(at<wire::TokenLogprob>(data, where.top), {entries, alternatives}, owner)};
  }
};

SegmentPtr checked(SegmentPtr segment, wire::SegmentKind kind, const wire::Geometry& geometry) {
  layout::check_segment(*segment, kind, geometry);
  return segment;
}

// One end of a ring, with what its slots look like to Python.
template <typename Ring, typename End>
class PyEnd {
 public:
  PyEnd(SegmentPtr segment, const py::array& geometry, bool takeover)
      : geometry_(to_geometry(geometry)),
        segment_(checked(std::move(segment), Ring::kKind, geometry_)),
        end_(ring_of(segment_), takeover) {}

  py::object slot(std::byte* data) const {
    if (data == nullptr) return py::none();
    return py::cast(Ring::slot(data, geometry_, py::cast(segment_)));
  }
  bool wait(double timeout_s) {
    return wait_interruptibly(
        to_ns(timeout_s, "timeout_s"),
        [&](std::uint64_t ns) { return end_.wait(ns, geometry_.spin_us); }, [] { return false; });
  }
  End& end() { return end_; }

 private:
  wire::Geometry geometry_;
  SegmentPtr segment_;
  End end_;
};

template <typename Ring>
void bind_producer(py::module_& module, const char* name) {
  using Self = PyEnd<Ring, ipc::Producer>;
  py::class_<Self>(module, name)
      .def(py::init<SegmentPtr, const py::array&, bool>(), py::arg("segment"), py::arg("geometry"),
           py::arg("takeover") = false)
      .def("acquire", [](Self& self) { return self.slot(self.end().acquire()); })
      .def("publish",
           [](Self& self) {
             if (self.end().acquire() == nullptr) throw NativeError("publish without a free slot");
             self.end().publish();
           })
      .def(
          "reset", [](Self& self, bool takeover) { self.end().reset(takeover); },
          py::arg("takeover") = false);
}

template <typename Ring>
void bind_consumer(py::module_& module, const char* name) {
  using Self = PyEnd<Ring, ipc::Consumer>;
  py::class_<Self>(module, name)
      .def(py::init<SegmentPtr, const py::array&, bool>(), py::arg("segment"), py::arg("geometry"),
           py::arg("takeover") = false)
      .def("wait", &Self::wait, py::arg("timeout_s"))
      .def("front", [](Self& self) { return self.slot(self.end().front()); })
      .def("release",
           [](Self& self) {
             if (self.end().front() == nullptr) throw NativeError("release of an empty ring");
             self.end().release();
           })
      .def("reset", [](Self& self) { self.end().reset(); });
}

py::array ns_array(const std::vector<std::uint64_t>& times) {
  return py::array_t<std::uint64_t>(static_cast<py::ssize_t>(times.size()), times.data());
}

ipc::ProbeOptions probe_options(bool ping, std::uint32_t n, std::uint32_t spin_us,
                                std::uint32_t gap_us, double timeout_s) {
  return {ping, n, spin_us, gap_us, to_ns(timeout_s, "timeout_s")};
}

py::tuple probe_rings(const SegmentPtr& steps, const SegmentPtr& results, const py::array& geometry,
                      bool ping, std::uint32_t n, std::uint32_t spin_us, std::uint32_t gap_us,
                      double timeout_s) {
  const wire::Geometry g = to_geometry(geometry);
  wire::RingHeader* there = ring_of(checked(steps, wire::SegmentKind::steps, g));
  wire::RingHeader* back = ring_of(checked(results, wire::SegmentKind::results, g));
  const ipc::ProbeOptions options = probe_options(ping, n, spin_us, gap_us, timeout_s);
  ipc::ProbeTimes times;
  {
    py::gil_scoped_release release;
    times = ipc::probe_rings(ping ? there : back, ping ? back : there, options);
  }
  return py::make_tuple(ns_array(times.one_way), ns_array(times.round_trip));
}

py::tuple probe_bells(const SegmentPtr& segment, const py::array& geometry, bool ping,
                      std::uint32_t n, std::uint32_t spin_us, std::uint32_t gap_us,
                      double timeout_s) {
  const layout::Work work(segment, to_geometry(geometry));
  wire::Doorbell* there = &work.channel(0)->published;
  wire::Doorbell* back = &work.channel(0)->done;
  const ipc::ProbeOptions options = probe_options(ping, n, spin_us, gap_us, timeout_s);
  ipc::ProbeTimes times;
  {
    py::gil_scoped_release release;
    times = ipc::probe_bells(ping ? there : back, ping ? back : there, options);
  }
  return py::make_tuple(ns_array(times.one_way), ns_array(times.round_trip));
}

void bind_probes(py::module_& module) {
  module.def("probe_rings", &probe_rings, py::arg("steps"), py::arg("results"), py::arg("geometry"),
             py::arg("ping"), py::arg("n"), py::arg("spin_us"), py::arg("gap_us") = 0,
             py::arg("timeout_s") = 10.0);
  module.def("probe_bells", &probe_bells, py::arg("work"), py::arg("geometry"), py::arg("ping"),
             py::arg("n"), py::arg("spin_us"), py::arg("gap_us") = 0, py::arg("timeout_s") = 10.0);
}

}  // namespace

void bind_rings(py::module_& module) {
  py::class_<StepSlot>(module, "StepSlot")
      .def_readonly("header", &StepSlot::header)
      .def_readonly("rows", &StepSlot::rows)
      .def_readonly("swaps", &StepSlot::swaps)
      .def_readonly("tokens", &StepSlot::tokens);
  py::class_<ResultSlot>(module, "ResultSlot")
      .def_readonly("header", &ResultSlot::header)
      .def_readonly("rows", &ResultSlot::rows)
      .def_readonly("logprobs", &ResultSlot::logprobs)
      .def_readonly("top", &ResultSlot::top);
  bind_producer<StepRing>(module, "StepProducer");
  bind_consumer<StepRing>(module, "StepConsumer");
  bind_producer<ResultRing>(module, "ResultProducer");
  bind_consumer<ResultRing>(module, "ResultConsumer");
  bind_probes(module);
}

}  // namespace neo::bindings
