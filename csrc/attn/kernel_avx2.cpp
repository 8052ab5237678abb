// AVX2, FMA and F16C: eight floats at a time.
#include <immintrin.h>

#include "attn/kernels.hpp"

namespace neo::attn::avx2 {
namespace {

struct Vec {
  static constexpr std::uint32_t kWidth = 8;
  __m256 value;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec set1(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static void store(float* to, Vec x) { _mm256_storeu_ps(to, x.value); }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.value, b.value, c.value)}; }
  static Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.value, b.value)}; }
  static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.value, b.value)}; }

  // exp(x) = 2^n * 2^f with n = round(x log2 e), |f| <= 1/2; the Taylor series of 2^f to degree 6
  // is exact to 1e-7 there. Below -87 the result would be subnormal: 0.
  static Vec exp(Vec x) {
    const __m256 low = _mm256_set1_ps(-87.0f);
    const __m256 kept = _mm256_cmp_ps(x.value, low, _CMP_GE_OQ);
    const __m256 y = _mm256_mul_ps(_mm256_max_ps(x.value, low), _mm256_set1_ps(1.44269504f));
    const __m256 n = _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // f in natural units from the two-part ln 2, so that a large n costs no accuracy.
    __m256 f = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), _mm256_max_ps(x.value, low));
    f = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), f);
    __m256 p = _mm256_set1_ps(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
      p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c));
    }
    const __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return {_mm256_and_ps(kept, _mm256_mul_ps(p, _mm256_castsi256_ps(power)))};
  }

  float reduce_add() const {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  float reduce_max() const {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }

  // The sums of eight vectors at once: three rounds of pairwise adds.
  template <std::uint32_t kRows>
  static void reduce_rows(const Vec* r, float* out) {
    static_assert(kRows == 8);
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(r[0].value, r[1].value),
                                    _mm256_hadd_ps(r[2].value, r[3].value));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(r[4].value, r[5].value),
                                    _mm256_hadd_ps(r[6].value, r[7].value));
    _mm256_storeu_ps(
        out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
  }

  template <wire::DType D>
  static Vec load_kv(const std::byte* from) {
    if constexpr (D == wire::DType::float32) {
      return {_mm256_loadu_ps(reinterpret_cast<const float*>(from))};
    } else if constexpr (D == wire::DType::int8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
      return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
    } else {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      if constexpr (D == wire::DType::float16) return {_mm256_cvtph_ps(halves)};
      return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
    }
  }
};

#include "attn/paged_attention-inl.hpp"

}  // namespace

void kernel(const TaskInput& in, const TaskOutput& out) { attend_any(in, out); }

}  // namespace neo::attn::avx2
