// int8 K and V with a scale per row, by VPDPBUSD: four products per lane, summed in int32, exactly.
//
// scores  queries are quantised to signed bytes, one scale per head: in two terms, q = s (128 high
// +
//         low), for groups up to 2, and in one term, q = s low, otherwise. K becomes unsigned by
//         adding 128, which adds 128 sum(q) to every score: a constant per head, taken off again.
// values  weights times the rows' scales are quantised to unsigned bytes against the largest of the
//         block (kTokens tokens); rows of four tokens are interleaved so that one lane sums
//         four tokens.
// A rounded weight is off by at most 1/510 of the block's largest, a one-term query element by
// 1/254 of the head's largest; both are of the order of what rounding K and V themselves costs.
#pragma once

#include "attn/vector512-inl.hpp"

constexpr std::uint32_t kSteps8 = 64;  // elements of a register

template <std::uint32_t kDim>
struct Int8Task {
  static constexpr std::uint32_t kBlocks = (kDim + kSteps8 - 1) / kSteps8;
  static constexpr std::uint32_t kColumns = kBlocks * kSteps8;
  static constexpr std::uint32_t kRowBytes = kDim;
  static constexpr float kHighUnit = 128.0f;

  alignas(64) std::int8_t q[2][kMaxHeads][kColumns];  // low and high terms
  alignas(64) std::int32_t folded[kMaxHeads][4][kLanes];
  alignas(64) float scores[kMaxHeads][kTokens];
  alignas(64) std::uint8_t weights[kMaxHeads][kTokens];
  State<kColumns> state;
  float q_scale[kMaxHeads];          // with the scale of the scores
  std::int32_t q_offset[kMaxHeads];  // 128 sum(q)
  float weight_unit[kMaxHeads];      // of the current block
  std::uint32_t group;
  Spread spread;
  TilePrefetch prefetch;

  static __m512i load(const std::byte* row, std::uint32_t block) {
    if (kDim % kSteps8 != 0 && block == kBlocks - 1) {
      return _mm512_maskz_loadu_epi8((1ULL << kDim % kSteps8) - 1, row + block * 64);
    }
    return _mm512_loadu_si512(row + block * 64);
  }

  explicit Int8Task(const TaskInput& in)
      : state(in.group), group(in.group), spread(in.group, kRowBytes / kLine) {
    std::memset(q, 0, sizeof(q));
    std::memset(folded, 0, sizeof(folded));
    for (std::uint32_t h = 0; h < group; ++h) {
      quantize_query(in.q + h * kDim, h, in.scale);
    }
  }

  void quantize_query(const float* from, std::uint32_t h, float scale) {
    float top = 0.0f;
    for (std::uint32_t d = 0; d < kDim; ++d) {
      const float size = from[d] < 0 ? -from[d] : from[d];
      top = size > top ? size : top;
    }
    const bool two_terms = group <= 2;
    const float range = two_terms ? 126.0f * kHighUnit : 127.0f;
    const float unit = top / range;
    std::int32_t total = 0;
    for (std::uint32_t d = 0; d < kDim; ++d) {
      const auto whole =
          static_cast<std::int32_t>(unit > 0.0f ? __builtin_rintf(from[d] / unit) : 0.0f);
      const std::int32_t high = two_terms ? (whole + 64) >> 7 : 0;
      q[0][h][d] = static_cast<std::int8_t>(whole - high * 128);
      q[1][h][d] = static_cast<std::int8_t>(high);
      total += whole;
    }
    q_offset[h] = total * 128;
    q_scale[h] = unit * scale;
  }

  template <bool kTwoTerms>
  void score_rows(const std::byte* k, std::uint32_t quad) {
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i rows[4][kBlocks];
    for (std::uint32_t t = 0; t < 4; ++t) {
      for (std::uint32_t b = 0; b < kBlocks; ++b) {
        rows[t][b] = _mm512_xor_si512(load(k + t * kRowBytes, b), flip);
      }
    }
    for (std::uint32_t h = 0; h < group; ++h) {
      __m512i low[4] = {}, high[4] = {};
      for (std::uint32_t b = 0; b < kBlocks; ++b) {
        const __m512i query = _mm512_load_si512(q[0][h] + b * kSteps8);
        for (std::uint32_t t = 0; t < 4; ++t) {
          low[t] = _mm512_dpbusd_epi32(low[t], rows[t][b], query);
        }
        if constexpr (kTwoTerms) {
          const __m512i upper = _mm512_load_si512(q[1][h] + b * kSteps8);
          for (std::uint32_t t = 0; t < 4; ++t) {
            high[t] = _mm512_dpbusd_epi32(high[t], rows[t][b], upper);
          }
        }
      }
      __m512 sum[4];
      for (std::uint32_t t = 0; t < 4; ++t) {
        if constexpr (kTwoTerms) {
          low[t] = _mm512_add_epi32(low[t], _mm512_slli_epi32(high[t], 7));
        }
        sum[t] = _mm512_castsi512_ps(low[t]);
      }
      _mm512_store_ps(folded[h][quad], fold_tokens<IntSum>(sum));
      prefetch.step(spread.after[h]);
    }
  }

  template <bool kTwoTerms>
  void score(const std::byte* k, const float* k_scale, std::uint32_t n) {
    for (std::uint32_t t = 0; t < n; t += kLanes) {
      for (std::uint32_t quad = 0; quad < 4 && t + quad * 4 < n; ++quad) {
        score_rows<kTwoTerms>(k + (t + quad * 4) * kRowBytes, quad);
      }
      const __m512 row_scale = _mm512_maskz_loadu_ps(token_mask(n, t), k_scale + t);
      for (std::uint32_t h = 0; h < group; ++h) {
        const __m512 x[4] = {_mm512_load_ps(folded[h][0]), _mm512_load_ps(folded[h][1]),
                             _mm512_load_ps(folded[h][2]), _mm512_load_ps(folded[h][3])};
        const __m512i dot = _mm512_sub_epi32(_mm512_castps_si512(fold_lanes<IntSum>(x)),
                                             _mm512_set1_epi32(q_offset[h]));
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), row_scale);
        _mm512_store_ps(scores[h] + t, _mm512_mul_ps(scaled, _mm512_set1_ps(q_scale[h])));
      }
    }
  }

  void weigh(const float* v_scale, std::uint32_t n) {
    __m512 row_scale[kGroups];
    for (std::uint32_t i = 0; i < kGroups; ++i) {
      row_scale[i] = _mm512_maskz_loadu_ps(token_mask(n, i * kLanes), v_scale + i * kLanes);
    }
    for (std::uint32_t h = 0; h < group; ++h) {
      __m512 x[kGroups];
      for (std::uint32_t i = 0; i < kGroups; ++i) x[i] = _mm512_load_ps(scores[h] + i * kLanes);
      soften(state, h, n, x);
      __m512 sum = _mm512_setzero_ps(), largest = sum;
      for (std::uint32_t i = 0; i < kGroups; ++i) {
        sum = _mm512_add_ps(sum, x[i]);
        x[i] = _mm512_mul_ps(x[i], row_scale[i]);
        largest = _mm512_max_ps(largest, x[i]);
      }
      state.add_to_sum(h, sum);
      const float top = _mm512_reduce_max_ps(largest);
      // Below this every weight times its row is nothing beside what is summed already.
      const float usable = top < 1e-36f ? 1e-36f : top;
      weight_unit[h] = usable / 255.0f;
      const __m512 to_units = _mm512_set1_ps(255.0f / usable);
      for (std::uint32_t i = 0; i < kGroups; ++i) {
        const __m128i bytes =
            _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x[i], to_units)));
        _mm_store_si128(reinterpret_cast<__m128i*>(weights[h] + i * kLanes), bytes);
      }
    }
  }

  // Four rows -> four registers whose lanes hold one column of the four.
  static void interleave(const std::byte* v, std::uint32_t left, std::uint32_t block,
                         __m512i* out) {
    __m512i row[4];
    for (std::uint32_t t = 0; t < 4; ++t) {
      row[t] = t < left ? load(v + t * kRowBytes, block) : _mm512_setzero_si512();
    }
    const __m512i low01 = _mm512_unpacklo_epi8(row[0], row[1]);
    const __m512i high01 = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(row[2], row[3]);
    const __m512i high23 = _mm512_unpackhi_epi8(row[2], row[3]);
    out[0] = _mm512_unpacklo_epi16(low01, low23);
    out[1] = _mm512_unpackhi_epi16(low01, low23);
    out[2] = _mm512_unpacklo_epi16(high01, high23);
    out[3] = _mm512_unpackhi_epi16(high01, high23);
  }

  template <std::uint32_t kHeads>
  void add_quad(__m512i (&sum)[kHeads][4], std::uint32_t h0, std::uint32_t t, std::uint32_t block,
                const std::byte* v, std::uint32_t left) {
    __m512i values[4];
    interleave(v, left, block, values);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      std::int32_t four;
      std::memcpy(&four, weights[h0 + h] + t, sizeof(four));
      const __m512i weight = _mm512_set1_epi32(four);
      for (int i = 0; i < 4; ++i) sum[h][i] = _mm512_dpbusd_epi32(sum[h][i], weight, values[i]);
    }
  }

  template <std::uint32_t kHeads>
  void value_heads(const std::byte* v, std::uint32_t n, std::uint32_t h0) {
    for (std::uint32_t block = 0; block < kBlocks; ++block) {
      __m512i sum[kHeads][4] = {};
      std::uint32_t t = 0;
      for (; t + 4 <= n; t += 4) {
        if (h0 == 0) prefetch.step(1);
        add_quad<kHeads>(sum, h0, t, block, v + t * kRowBytes, 4);
      }
      if (t < n) add_quad<kHeads>(sum, h0, t, block, v + t * kRowBytes, n - t);
      for (std::uint32_t h = 0; h < kHeads; ++h) {
        const __m512 unit = _mm512_set1_ps(weight_unit[h0 + h]);
        for (int i = 0; i < 4; ++i) {
          float* o = state.o[h0 + h] + block * kSteps8 + i * kLanes;
          const __m512 added = _mm512_cvtepi32_ps(sum[h][i]);
          _mm512_store_ps(o, _mm512_fmadd_ps(added, unit, _mm512_load_ps(o)));
        }
      }
    }
  }

  void block(const std::byte* tile, const TaskInput& in, std::uint32_t first, std::uint32_t n) {
    const auto scales = [&](const std::byte* rows) {
      return reinterpret_cast<const float*>(rows + in.page_size * kRowBytes) + first;
    };
    const std::byte* k = tile + first * kRowBytes;
    if (group <= 2) {
      score<true>(k, scales(tile), n);
    } else {
      score<false>(k, scales(tile), n);
    }
    weigh(scales(tile + in.tile_bytes), n);
    const std::byte* v = k + in.tile_bytes;
    std::uint32_t h = 0;
    for (; h + 4 <= group; h += 4) value_heads<4>(v, n, h);
    for (; h < group; ++h) value_heads<1>(v, n, h);
  }

  // interleave leaves bytes 4 i .. 4 i + 3 of each 128-bit lane in register i.
  static std::uint32_t column(std::uint32_t d) {
    const std::uint32_t within = d % kSteps8;
    return d - within + within / 4 % 4 * kLanes + within / 16 * 4 + within % 4;
  }
};
