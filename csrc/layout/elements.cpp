#include "layout/elements.hpp"

#include <algorithm>

namespace neo::layout {
namespace {

std::size_t width(wire::DType dtype) { return dtype == wire::DType::float32 ? 4 : 2; }

}  // namespace

void to_floats(const void* from, wire::DType dtype, float* to, std::size_t n) {
  if (dtype == wire::DType::float32) {
    std::memcpy(to, from, n * sizeof(float));
    return;
  }
  const auto* halves = static_cast<const std::uint16_t*>(from);
  if (dtype == wire::DType::float16) {
    for (std::size_t i = 0; i < n; ++i) to[i] = from_float16(halves[i]);
  } else {
    for (std::size_t i = 0; i < n; ++i) to[i] = from_bfloat16(halves[i]);
  }
}

void from_floats(const float* from, void* to, wire::DType dtype, std::size_t n) {
  if (dtype == wire::DType::float32) {
    std::memcpy(to, from, n * sizeof(float));
    return;
  }
  auto* halves = static_cast<std::uint16_t*>(to);
  if (dtype == wire::DType::float16) {
    for (std::size_t i = 0; i < n; ++i) halves[i] = to_float16(from[i]);
  } else {
    for (std::size_t i = 0; i < n; ++i) halves[i] = to_bfloat16(from[i]);
  }
}

void convert(const void* from, wire::DType from_dtype, void* to, wire::DType to_dtype,
             std::size_t n) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, n * width(from_dtype));
    return;
  }
  constexpr std::size_t kChunk = 256;
  float buffer[kChunk];
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  for (std::size_t done = 0; done < n; done += kChunk) {
    const std::size_t count = std::min(kChunk, n - done);
    to_floats(source + done * width(from_dtype), from_dtype, buffer, count);
    from_floats(buffer, target + done * width(to_dtype), to_dtype, count);
  }
}

}  // namespace neo::layout
