// What a Geometry may hold, and quantities derived from it.
#pragma once

#include <cstdint>

#include "protos/wire.hpp"

namespace neo::layout {

inline constexpr std::uint32_t kMaxGroup = 16;     // query heads per K/V head
inline constexpr std::uint32_t kMaxHeadDim = 256;  // elements
inline constexpr std::uint32_t kHeadDimStep = 16;  // head_dim is a multiple: one AVX-512 vector
inline constexpr std::uint32_t kMaxPageSize = 256;

// Throws std::invalid_argument that names the field, its value and the limit.
void validate_geometry(const wire::Geometry& geometry);

inline std::uint32_t element_size(std::uint32_t dtype) {
  switch (static_cast<wire::DType>(dtype)) {
    case wire::DType::float32:
      return 4;
    case wire::DType::float16:
    case wire::DType::bfloat16:
      return 2;
    case wire::DType::int8:
      return 1;
  }
  return 0;
}

inline std::uint32_t group_size(const wire::Geometry& g) { return g.n_heads / g.n_kv_heads; }

}  // namespace neo::layout
