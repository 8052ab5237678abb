// AVX-512 F, BW, DQ and VL: sixteen floats at a time.
#include <immintrin.h>

#include "attn/kernels.hpp"

namespace neo::attn::avx512 {
namespace {

struct Vec {
  static constexpr std::uint32_t kWidth = 16;
  __m512 value;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set1(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static void store(float* to, Vec x) { _mm512_storeu_ps(to, x.value); }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.value, b.value, c.value)}; }
  static Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.value, b.value)}; }
  static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.value, b.value)}; }

  // As in kernel_avx2.cpp; the scaling by 2^n is one instruction here.
  static Vec exp(Vec x) {
    const __m512 low = _mm512_set1_ps(-87.0f);
    const __mmask16 kept = _mm512_cmp_ps_mask(x.value, low, _CMP_GE_OQ);
    const __m512 y = _mm512_max_ps(x.value, low);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), y);
    f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
      p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    }
    return {_mm512_maskz_scalef_ps(kept, p, n)};
  }

  float reduce_add() const { return _mm512_reduce_add_ps(value); }
  float reduce_max() const { return _mm512_reduce_max_ps(value); }

  // The sums of sixteen vectors at once. Each round adds the two halves of pairs of vectors and
  // packs them, so that four rounds leave one vector with one sum per lane.
  template <std::uint32_t kRows>
  static void reduce_rows(const Vec* r, float* out) {
    static_assert(kRows == 16);
    __m512 quads[4];  // quads[i]: lane 4j + k holds part j of the sum of row 4i + k
    for (int i = 0; i < 4; ++i) {
      const Vec* row = r + 4 * i;
      const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(row[0].value, row[1].value),
                                     _mm512_unpackhi_ps(row[0].value, row[1].value));
      const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(row[2].value, row[3].value),
                                     _mm512_unpackhi_ps(row[2].value, row[3].value));
      quads[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88),
                                     _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88),
                                      _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                                        _mm512_shuffle_f32x4(low, high, 0xdd)));
  }

  template <wire::DType D>
  static Vec load_kv(const std::byte* from) {
    if constexpr (D == wire::DType::float32) {
      return {_mm512_loadu_ps(reinterpret_cast<const float*>(from))};
    } else {
      const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      if constexpr (D == wire::DType::float16) return {_mm512_cvtph_ps(halves)};
      return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
    }
  }
};

#include "attn/paged_attention-inl.hpp"

}  // namespace

void kernel(const TaskInput& in, const TaskOutput& out) { attend_any(in, out); }

}  // namespace neo::attn::avx512
