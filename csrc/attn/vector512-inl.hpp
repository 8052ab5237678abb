// Pieces that the AVX-512 kernels share. Included inside the anonymous namespace of each.
#pragma once

#include "attn/tile_prefetch-inl.hpp"

constexpr std::uint32_t kMaxHeads = 16;
constexpr std::uint32_t kLanes = 16;
// Tokens between two updates of the maximum. 64 halve what softmax costs beside 32.
constexpr std::uint32_t kTokens = 64;
constexpr std::uint32_t kGroups = kTokens / kLanes;

// Sums of partial sums. `Sum` adds two registers: floats for bf16, int32 for int8.
struct FloatSum {
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
};
struct IntSum {
  static __m512 add(__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
};

// Four registers, one per token -> each 128-bit lane holds that lane's partial sum of the four.
// A blend replaces one shuffle of the first round: blends run on any port.
template <class Sum>
inline __m512 fold_tokens(const __m512* x) {
  const __m512 low =
      Sum::add(_mm512_mask_blend_ps(0xcccc, x[0], x[1]), _mm512_shuffle_ps(x[0], x[1], 0x4e));
  const __m512 high =
      Sum::add(_mm512_mask_blend_ps(0xcccc, x[2], x[3]), _mm512_shuffle_ps(x[2], x[3], 0x4e));
  return Sum::add(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
}

// Four results of fold_tokens -> sixteen sums, one per token, in order.
template <class Sum>
inline __m512 fold_lanes(const __m512* x) {
  const __m512 low =
      Sum::add(_mm512_mask_blend_ps(0xff00, x[0], x[1]), _mm512_shuffle_f32x4(x[0], x[1], 0x4e));
  const __m512 high =
      Sum::add(_mm512_mask_blend_ps(0xff00, x[2], x[3]), _mm512_shuffle_f32x4(x[2], x[3], 0x4e));
  return Sum::add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// exp(x) for x <= 0; 0 where `kept` is not set or the result would be subnormal. Relative error
// below 1e-5, far below what a weight is rounded to: the Taylor series of 2^f to degree 5, |f| <=
// 1/2 (2.4e-6), and x log2 e in one rounding (7e-6 at x = -87, where weights no longer count).
inline __m512 exp_weights(__mmask16 kept, __m512 x) {
  const __m512 low = _mm512_set1_ps(-87.0f);
  kept = _mm512_mask_cmp_ps_mask(kept, x, low, _CMP_GE_OQ);
  const __m512 y = _mm512_mul_ps(_mm512_max_ps(x, low), _mm512_set1_ps(1.44269504f));
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(y, n);
  __m512 p = _mm512_set1_ps(1.33335581e-3f);
  for (float c : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) {
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  }
  return _mm512_maskz_scalef_ps(kept, p, n);
}

// Lanes of a register that hold tokens below `n`, the first lane being token `first`.
inline __mmask16 token_mask(std::uint32_t n, std::uint32_t first) {
  if (n >= first + kLanes) return 0xffff;
  return n <= first ? 0 : static_cast<__mmask16>((1u << (n - first)) - 1);
}

// One task's running state. o is in the order of columns that the value kernel leaves.
template <std::uint32_t kColumns>
struct State {
  alignas(64) float o[kMaxHeads][kColumns];
  alignas(64) float l[kMaxHeads][kLanes];  // by lane; summed at the end
  float m[kMaxHeads];

  explicit State(std::uint32_t group) {
    std::memset(o, 0, sizeof(o[0]) * group);
    std::memset(l, 0, sizeof(l));
    for (std::uint32_t h = 0; h < group; ++h) m[h] = -__FLT_MAX__;
  }
  void add_to_sum(std::uint32_t h, __m512 weights) {
    _mm512_store_ps(l[h], _mm512_add_ps(_mm512_load_ps(l[h]), weights));
  }
};

// Turns kTokens scaled scores of head h into weights, in place, and rescales what was summed under
// an older maximum.
template <std::uint32_t kColumns>
inline void soften(State<kColumns>& state, std::uint32_t h, std::uint32_t n, __m512* x) {
  const __m512 lowest = _mm512_set1_ps(-__FLT_MAX__);
  __m512 top = lowest;
  for (std::uint32_t i = 0; i < kGroups; ++i) {
    x[i] = _mm512_mask_mov_ps(lowest, token_mask(n, i * kLanes), x[i]);
    top = _mm512_max_ps(top, x[i]);
  }
  if (_mm512_cmp_ps_mask(top, _mm512_set1_ps(state.m[h]), _CMP_GT_OQ) != 0) {
    const float larger = _mm512_reduce_max_ps(top);
    const __m512 older = exp_weights(0xffff, _mm512_set1_ps(state.m[h] - larger));
    for (std::uint32_t d = 0; d < kColumns; d += kLanes) {
      _mm512_store_ps(state.o[h] + d, _mm512_mul_ps(_mm512_load_ps(state.o[h] + d), older));
    }
    _mm512_store_ps(state.l[h], _mm512_mul_ps(_mm512_load_ps(state.l[h]), older));
    state.m[h] = larger;
  }
  const __m512 m = _mm512_set1_ps(state.m[h]);
  for (std::uint32_t i = 0; i < kGroups; ++i) {
    x[i] = exp_weights(token_mask(n, i * kLanes), _mm512_sub_ps(x[i], m));
  }
}

// How many prefetch steps follow head h's scores, so that `steps` are spread over the group.
struct Spread {
  std::uint8_t after[kMaxHeads];
  Spread(std::uint32_t group, std::uint32_t steps) {
    for (std::uint32_t h = 0; h < group; ++h) {
      after[h] = static_cast<std::uint8_t>((h + 1) * steps / group - h * steps / group);
    }
  }
};
