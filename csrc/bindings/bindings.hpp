// Helpers that every bindings file uses; the only headers of the project that know Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "ipc/shm_segment.hpp"
#include "layout/geometry.hpp"
#include "protos/wire.hpp"

namespace neo::bindings {

namespace py = pybind11;
using SegmentPtr = std::shared_ptr<ipc::Segment>;

void bind_layout(py::module_& module);     // dtypes, errors, Segment, Control, Sequences
void bind_rings(py::module_& module);      // step and result rings
void bind_attention(py::module_& module);  // CpuCache, attend
void bind_offload(py::module_& module);    // Exchange, AttentionWorker
void bind_timeline(py::module_& module);   // dtypes of the timeline segment

inline wire::Geometry to_geometry(const py::array& array) {
  if (array.ndim() != 0 || !array.dtype().equal(py::dtype::of<wire::Geometry>())) {
    throw std::invalid_argument("geometry must be a 0-d array of geometry_dtype");
  }
  wire::Geometry geometry;
  std::memcpy(&geometry, array.data(), sizeof(geometry));
  return geometry;
}

// An array over memory that `owner` keeps mapped.
template <typename T>
py::array view(T* data, py::array::ShapeContainer shape, const py::object& owner) {
  return py::array(py::dtype::of<T>(), std::move(shape), data, owner);
}

inline std::uint64_t to_ns(double seconds, const char* field) {
  if (!(seconds >= 0.0) || seconds > 1e9) {
    throw std::invalid_argument(std::string(field) + " is " + std::to_string(seconds) +
                                "; it must be from 0 to 1e9 seconds");
  }
  return static_cast<std::uint64_t>(seconds * 1e9);
}

// Waits in slices so that Ctrl-C and signal handlers get their turn: `slice(ns)` waits for at most
// that long, without the GIL, and says whether it has come; `hopeless()` ends the wait early.
template <typename Slice, typename Hopeless>
bool wait_interruptibly(std::uint64_t timeout_ns, const Slice& slice, const Hopeless& hopeless) {
  constexpr std::uint64_t kSlice = 50'000'000;
  for (;;) {
    const std::uint64_t now = timeout_ns < kSlice ? timeout_ns : kSlice;
    {
      py::gil_scoped_release release;
      if (slice(now)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    timeout_ns -= now;
    if (timeout_ns == 0 || hopeless()) return false;
  }
}

}  // namespace neo::bindings
