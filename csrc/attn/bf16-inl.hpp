// bf16 K and V with bf16 queries, by VDPBF16PS: two products per lane, summed in float32.
//
// scores  K rows of four tokens stay in registers while the queries pass; what is left of each
//         query (four registers) folds to one, so no accumulator is ever spilt.
// values  rows of two tokens are interleaved to pairs and multiplied by pairs of weights. Weights
//         are split in two bf16 terms for groups up to 4, where arithmetic is free; otherwise one
//         term serves (relative error of a weight 2^-9).
#pragma once

#include "attn/vector512-inl.hpp"

constexpr std::uint32_t kSteps16 = 32;  // elements of a register

// Whether bf16 holds the queries exactly: VDPBF16PS and AMX take nothing else.
inline bool queries_are_bf16(const TaskInput& in) {
  std::uint32_t low_bits = 0;
  for (std::uint32_t i = 0; i < in.group * in.head_dim; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, in.q + i, sizeof(bits));
    low_bits |= bits & 0xffff;
  }
  return low_bits == 0;
}

template <std::uint32_t kDim>
struct Bf16Task {
  static constexpr std::uint32_t kBlocks = (kDim + kSteps16 - 1) / kSteps16;
  static constexpr std::uint32_t kColumns = kBlocks * kSteps16;
  static constexpr std::uint32_t kRowBytes = kDim * 2;
  static constexpr std::uint32_t kPart = kBlocks < 4 ? kBlocks : 4;  // registers of K per token

  alignas(64) std::uint16_t q[kMaxHeads][kColumns];
  alignas(64) float folded[kMaxHeads][4][kLanes];
  alignas(64) float scores[kMaxHeads][kTokens];
  alignas(64) std::uint16_t weights[2][kMaxHeads][kTokens];  // high and low terms
  State<kColumns> state;
  std::uint32_t group;
  float scale;
  Spread spread;
  TilePrefetch prefetch;

  static __m512i load(const std::byte* row, std::uint32_t block) {
    const std::byte* at = row + block * 64;
    if (kDim % kSteps16 != 0 && block == kBlocks - 1) {
      return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    return _mm512_loadu_si512(at);
  }

  explicit Bf16Task(const TaskInput& in)
      : state(in.group), group(in.group), scale(in.scale), spread(in.group, kRowBytes / kLine) {
    std::memset(q, 0, sizeof(q));
    std::memset(folded, 0, sizeof(folded));
    for (std::uint32_t h = 0; h < group; ++h) {
      for (std::uint32_t d = 0; d < kDim; ++d) {
        std::uint32_t bits;
        std::memcpy(&bits, in.q + h * kDim + d, sizeof(bits));
        q[h][d] = static_cast<std::uint16_t>(bits >> 16);
      }
    }
  }

  // Columns [first, first + kPart) of four rows against every query; later parts add.
  template <std::uint32_t kFirst>
  void score_rows(const std::byte* k, std::uint32_t quad) {
    constexpr std::uint32_t kEnd = kFirst + kPart < kBlocks ? kFirst + kPart : kBlocks;
    __m512bh rows[4][kPart];
    for (std::uint32_t t = 0; t < 4; ++t) {
      for (std::uint32_t b = kFirst; b < kEnd; ++b) {
        rows[t][b - kFirst] = (__m512bh)load(k + t * kRowBytes, b);
      }
    }
    for (std::uint32_t h = 0; h < group; ++h) {
      __m512 sum[4] = {};
      for (std::uint32_t b = kFirst; b < kEnd; ++b) {
        const auto query = (__m512bh)_mm512_load_si512(q[h] + b * kSteps16);
        for (std::uint32_t t = 0; t < 4; ++t) {
          sum[t] = _mm512_dpbf16_ps(sum[t], rows[t][b - kFirst], query);
        }
      }
      __m512 part = fold_tokens<FloatSum>(sum);
      if constexpr (kFirst != 0) part = _mm512_add_ps(part, _mm512_load_ps(folded[h][quad]));
      _mm512_store_ps(folded[h][quad], part);
      if (kFirst == 0) prefetch.step(spread.after[h]);
    }
    if constexpr (kEnd < kBlocks) score_rows<kEnd>(k, quad);
  }

  void score(const std::byte* k, std::uint32_t n) {
    for (std::uint32_t t = 0; t < n; t += kLanes) {
      for (std::uint32_t quad = 0; quad < 4 && t + quad * 4 < n; ++quad) {
        score_rows<0>(k + (t + quad * 4) * kRowBytes, quad);
      }
      for (std::uint32_t h = 0; h < group; ++h) {
        const __m512 x[4] = {_mm512_load_ps(folded[h][0]), _mm512_load_ps(folded[h][1]),
                             _mm512_load_ps(folded[h][2]), _mm512_load_ps(folded[h][3])};
        _mm512_store_ps(scores[h] + t,
                        _mm512_mul_ps(fold_lanes<FloatSum>(x), _mm512_set1_ps(scale)));
      }
    }
  }

  static __m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  // The sum takes the weights as the values will see them, so that rounding cancels in O / l.
  template <bool kTwoTerms>
  void weigh(std::uint32_t n) {
    for (std::uint32_t h = 0; h < group; ++h) {
      __m512 x[kGroups];
      for (std::uint32_t i = 0; i < kGroups; ++i) x[i] = _mm512_load_ps(scores[h] + i * kLanes);
      soften(state, h, n, x);
      __m512 sum = _mm512_setzero_ps();
      for (std::uint32_t i = 0; i < kGroups; ++i) {
        const auto high = (__m256i)_mm512_cvtneps_pbh(x[i]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(weights[0][h] + i * kLanes), high);
        if constexpr (kTwoTerms) {
          const auto low = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x[i], widen(high)));
          _mm256_store_si256(reinterpret_cast<__m256i*>(weights[1][h] + i * kLanes), low);
          sum = _mm512_add_ps(sum, x[i]);
        } else {
          sum = _mm512_add_ps(sum, widen(high));
        }
      }
      state.add_to_sum(h, sum);
    }
  }

  static __m512bh pair_of(const std::uint16_t* weight) {
    std::int32_t pair;
    std::memcpy(&pair, weight, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
  }

  template <std::uint32_t kHeads, std::uint32_t kVectors, bool kTwoTerms>
  void add_pair(__m512 (&sum)[kHeads][kVectors][2], std::uint32_t h0, std::uint32_t t,
                std::uint32_t block, const std::byte* v, bool odd) {
    __m512bh low[kVectors], high[kVectors];
    for (std::uint32_t i = 0; i < kVectors; ++i) {
      const __m512i a = load(v, block + i);
      // The row after the last token is never read: it may hold NaN.
      const __m512i b = odd ? _mm512_setzero_si512() : load(v + kRowBytes, block + i);
      low[i] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      high[i] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    for (std::uint32_t term = 0; term < (kTwoTerms ? 2 : 1); ++term) {
      for (std::uint32_t h = 0; h < kHeads; ++h) {
        const __m512bh weight = pair_of(weights[term][h0 + h] + t);
        for (std::uint32_t i = 0; i < kVectors; ++i) {
          sum[h][i][0] = _mm512_dpbf16_ps(sum[h][i][0], low[i], weight);
          sum[h][i][1] = _mm512_dpbf16_ps(sum[h][i][1], high[i], weight);
        }
      }
    }
  }

  template <std::uint32_t kHeads, std::uint32_t kVectors, bool kTwoTerms>
  void value_strip(const std::byte* v, std::uint32_t n, std::uint32_t h0, std::uint32_t block) {
    __m512 sum[kHeads][kVectors][2];
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      float* o = state.o[h0 + h] + block * kSteps16;
      for (std::uint32_t i = 0; i < kVectors * 2; ++i) {
        sum[h][i / 2][i % 2] = _mm512_load_ps(o + i * kLanes);
      }
    }
    std::uint32_t t = 0;
    for (; t + 2 <= n; t += 2) {
      // 2 kVectors lines are read per pair; a step is four lines.
      if (h0 == 0 && (kVectors > 1 || t % 4 == 0)) prefetch.step((kVectors + 1) / 2);
      add_pair<kHeads, kVectors, kTwoTerms>(sum, h0, t, block, v + t * kRowBytes, false);
    }
    if (t < n) add_pair<kHeads, kVectors, kTwoTerms>(sum, h0, t, block, v + t * kRowBytes, true);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      float* o = state.o[h0 + h] + block * kSteps16;
      for (std::uint32_t i = 0; i < kVectors * 2; ++i) {
        _mm512_store_ps(o + i * kLanes, sum[h][i / 2][i % 2]);
      }
    }
  }

  template <std::uint32_t kHeads, std::uint32_t kWide, bool kTwoTerms>
  void value_heads(const std::byte* v, std::uint32_t n, std::uint32_t h0) {
    constexpr std::uint32_t kVectors = kWide < kBlocks ? kWide : kBlocks;
    std::uint32_t block = 0;
    for (; block + kVectors <= kBlocks; block += kVectors) {
      value_strip<kHeads, kVectors, kTwoTerms>(v, n, h0, block);
    }
    for (; block < kBlocks; ++block) value_strip<kHeads, 1, kTwoTerms>(v, n, h0, block);
  }

  void value(const std::byte* v, std::uint32_t n) {
    std::uint32_t h = 0;
    if (group <= 4) {
      if (group == 4) return value_heads<4, 2, true>(v, n, 0);
      if (group >= 2) {
        value_heads<2, 2, true>(v, n, 0);
        h = 2;
      }
      if (h < group) value_heads<1, 4, true>(v, n, h);
      return;
    }
    for (; h + 8 <= group; h += 8) value_heads<8, 1, false>(v, n, h);
    for (; h + 4 <= group; h += 4) value_heads<4, 2, false>(v, n, h);
    for (; h < group; ++h) value_heads<1, 4, false>(v, n, h);
  }

  void block(const std::byte* tile, const TaskInput& in, std::uint32_t first, std::uint32_t n) {
    score(tile + first * kRowBytes, n);
    if (group <= 4) {
      weigh<true>(n);
    } else {
      weigh<false>(n);
    }
    value(tile + in.tile_bytes + first * kRowBytes, n);
  }

  // Where column d of a row went: unpack leaves words 0-3 of each 128-bit lane in the first
  // register and words 4-7 in the second.
  static std::uint32_t column(std::uint32_t d) {
    const std::uint32_t within = d % kSteps16;
    return d - within + within / 4 % 2 * kLanes + within / 8 * 4 + within % 4;
  }
};
