#include "layout/elements.hpp"

#include <algorithm>
#include <cmath>

#include "layout/elements_x86.hpp"

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
  if (dtype == wire::DType::float16 && x86::runnable()) {
    x86::float16_to_floats(halves, to, n);
  } else if (dtype == wire::DType::float16) {
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
  if (dtype == wire::DType::float16 && x86::runnable()) {
    x86::floats_to_float16(from, halves, n);
  } else if (dtype == wire::DType::float16) {
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

float quantize(const float* from, std::int8_t* to, std::size_t n) {
  return x86::runnable() ? x86::quantize(from, to, n) : quantize_portable(from, to, n);
}

float quantize_portable(const float* from, std::int8_t* to, std::size_t n) {
  float top = 0.0f;
  for (std::size_t i = 0; i < n; ++i) top = std::max(top, std::fabs(from[i]));
  // Divides instead of multiplying by 1 / scale, which overflows where scale is subnormal.
  const float scale = top / 127.0f;
  for (std::size_t i = 0; i < n; ++i) {
    const float value = scale == 0.0f ? 0.0f : std::nearbyint(from[i] / scale);
    to[i] = static_cast<std::int8_t>(std::min(127.0f, std::max(-127.0f, value)));
  }
  return scale;
}

}  // namespace neo::layout
