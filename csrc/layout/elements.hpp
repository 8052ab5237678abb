// Conversion between float and the element types of activations and caches, portable and exact:
// rounds to nearest even, keeps NaN, gives infinity where a value is too large.
#pragma once

#include <cstdint>
#include <cstring>

#include "protos/wire.hpp"

namespace neo::layout {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float from_bfloat16(std::uint16_t half) {
  return float_of(static_cast<std::uint32_t>(half) << 16);
}

inline std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fff'ffff) > 0x7f80'0000) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_float16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
  const std::uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f80'0000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x0400) return float_of(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -subnormal : subnormal;
}

inline std::uint16_t to_float16(float value) {
  const std::uint32_t bits = bits_of(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t magnitude = bits & 0x7fff'ffff;
  if (magnitude > 0x7f80'0000) return sign | 0x7e00;
  if (magnitude >= 0x4780'0000) return sign | 0x7c00;  // 65536 and above
  if (magnitude < 0x3880'0000) {
    // Subnormal: adding 0.5 puts the unit in the last place at 2^-24, and the sum rounds to it.
    return sign | static_cast<std::uint16_t>(bits_of(float_of(magnitude) + 0.5f) - 0x3f00'0000);
  }
  const std::uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return sign | static_cast<std::uint16_t>((rounded - (112u << 23)) >> 13);
}

// n elements of `dtype` (float32, float16 or bfloat16) to float.
void to_floats(const void* from, wire::DType dtype, float* to, std::size_t n);
// And back.
void from_floats(const float* from, void* to, wire::DType dtype, std::size_t n);
// Any of the three to any of the three; a plain copy where they are the same.
void convert(const void* from, wire::DType from_dtype, void* to, wire::DType to_dtype,
             std::size_t n);

// The one int8 quantiser: to[i] = round(from[i] / scale), scale = max |from| / 127, which is
// returned. Rounds to nearest even; a row of zeros has scale 0. The largest error is scale / 2.
float quantize(const float* from, std::int8_t* to, std::size_t n);
// The same without vector instructions.
float quantize_portable(const float* from, std::int8_t* to, std::size_t n);

}  // namespace neo::layout
