#include "layout/elements_x86.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "layout/elements.hpp"

// By attribute and not by compiler flags: nothing inline of this file can then be linked, compiled
// for AVX2, into a caller that runs without it.
#define NEO_AVX2 __attribute__((target("avx2,f16c")))

namespace neo::layout::x86 {

bool runnable() {
  static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return can;
}

NEO_AVX2 void float16_to_floats(const std::uint16_t* from, float* to, std::size_t n) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < n; ++i) to[i] = from_float16(from[i]);
}

NEO_AVX2 void floats_to_float16(const float* from, std::uint16_t* to, std::size_t n) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < n; ++i) to[i] = to_float16(from[i]);
}

namespace {

NEO_AVX2 float largest_magnitude(const float* from, std::size_t n) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 top = _mm256_setzero_ps();
  // max(x, top) gives top where x is not a number.
  for (std::size_t i = 0; i < n; i += 8) {
    top = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(from + i)), top);
  }
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

}  // namespace

NEO_AVX2 float quantize(const float* from, std::int8_t* to, std::size_t n) {
  if (n % 16 != 0) return quantize_portable(from, to, n);
  const float scale = largest_magnitude(from, n) / 127.0f;
  if (scale == 0.0f) {
    std::memset(to, 0, n);
    return scale;
  }
  const __m256 divisor = _mm256_set1_ps(scale);
  const __m128i floor = _mm_set1_epi8(-127);
  for (std::size_t i = 0; i < n; i += 16) {
    // Rounds to nearest even. What is not a number becomes the least integer, then -127.
    const __m256i a = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(from + i), divisor));
    const __m256i b = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(from + i + 8), divisor));
    const __m128i low = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i high = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    const __m128i bytes = _mm_max_epi8(_mm_packs_epi16(low, high), floor);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bytes);
  }
  return scale;
}

}  // namespace neo::layout::x86

#else

namespace neo::layout::x86 {

bool runnable() { return false; }
void float16_to_floats(const std::uint16_t*, float*, std::size_t) { __builtin_unreachable(); }
void floats_to_float16(const float*, std::uint16_t*, std::size_t) { __builtin_unreachable(); }
float quantize(const float*, std::int8_t*, std::size_t) { __builtin_unreachable(); }

}  // namespace neo::layout::x86

#endif
