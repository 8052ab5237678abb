// AVX2 and F16C forms of the conversions in elements.hpp, bit for bit the same on every number.
#pragma once

#include <cstddef>
#include <cstdint>

namespace neo::layout::x86 {

// Whether this machine can run what follows.
bool runnable();

void float16_to_floats(const std::uint16_t* from, float* to, std::size_t n);
void floats_to_float16(const float* from, std::uint16_t* to, std::size_t n);
float quantize(const float* from, std::int8_t* to, std::size_t n);

}  // namespace neo::layout::x86
