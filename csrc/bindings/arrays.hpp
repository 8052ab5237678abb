// Checked access to numpy arguments: shape, element size, contiguity, or ValueError.
#pragma once

#include <string>
#include <vector>

#include "bindings/bindings.hpp"

namespace neo::bindings {

inline std::string to_text(const py::ssize_t* shape, std::size_t n) {
  std::string text = "(";
  for (std::size_t i = 0; i < n; ++i) text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

inline void require_shape(const py::array& array, const char* name,
                          const std::vector<py::ssize_t>& shape) {
  const auto ndim = static_cast<std::size_t>(array.ndim());
  if (ndim == shape.size() && std::equal(shape.begin(), shape.end(), array.shape())) return;
  throw std::invalid_argument(std::string(name) + " has shape " + to_text(array.shape(), ndim) +
                              "; it must be " + to_text(shape.data(), shape.size()));
}

// Activations: float32, or any two-byte type that carries float16 or bfloat16 bits.
inline std::byte* act_data(const py::array& array, const char* name,
                           const std::vector<py::ssize_t>& shape, std::uint32_t act_dtype,
                           bool writable) {
  require_shape(array, name, shape);
  const bool is_float = array.dtype().kind() == 'f';
  const auto size = static_cast<std::uint32_t>(array.itemsize());
  if (size != layout::element_size(act_dtype) || (size == 4 && !is_float)) {
    throw std::invalid_argument(std::string(name) + " has dtype " +
                                std::string(py::str(array.dtype())) +
                                ", which does not fit act_dtype " + std::to_string(act_dtype));
  }
  if ((array.flags() & py::array::c_style) == 0) {
    throw std::invalid_argument(std::string(name) + " must be C-contiguous");
  }
  if (writable && !array.writeable()) {
    throw std::invalid_argument(std::string(name) + " must be writable");
  }
  return static_cast<std::byte*>(const_cast<void*>(array.data()));
}

inline const std::uint32_t* index_data(const py::array& array, const char* name, py::ssize_t n) {
  require_shape(array, name, {n});
  if (!array.dtype().equal(py::dtype::of<std::uint32_t>()) ||
      (array.flags() & py::array::c_style) == 0) {
    throw std::invalid_argument(std::string(name) + " must be a contiguous array of uint32");
  }
  return static_cast<const std::uint32_t*>(array.data());
}

}  // namespace neo::bindings
