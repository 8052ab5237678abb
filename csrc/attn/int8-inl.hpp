// int8 K and V with a scale per row, by VPDPBUSD: four products per lane, summed in int32, exactly.
//
// scores  words (four bytes) of four rows are transposed within 128-bit lanes, so that a register
//         holds one word of each of the four tokens in every lane and a query's sums need no
//         folding; the queries lie in memory in the matching order.
//         queries are quantised to signed bytes, one scale per head: in two terms, q = s (128 high
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

  // Low and high terms; word w of a lane as a register of its own, four times in that lane.
  alignas(64) std::int8_t q[2][kMaxHeads][kBlocks][4][kSteps8];
  // Of 16 tokens: one register for each four tokens, one sum for each token and lane.
  alignas(64) std::int32_t sums[kMaxHeads][4][kLanes];
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
      : state(in.group), group(in.group), spread(in.group, kLanes / kStepLines) {
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
    alignas(64) std::int8_t term[2][kColumns] = {};
    for (std::uint32_t d = 0; d < kDim; ++d) {
      const auto whole =
          static_cast<std::int32_t>(unit > 0.0f ? __builtin_rintf(from[d] / unit) : 0.0f);
      const std::int32_t high = two_terms ? (whole + 64) >> 7 : 0;
      term[0][d] = static_cast<std::int8_t>(whole - high * 128);
      term[1][d] = static_cast<std::int8_t>(high);
      total += whole;
    }
    for (std::uint32_t i = 0; i < 2; ++i) {
      for (std::uint32_t b = 0; b < kBlocks; ++b) {
        const __m512i row = _mm512_load_si512(term[i] + b * kSteps8);
        _mm512_store_si512(q[i][h][b][0], _mm512_shuffle_epi32(row, _MM_PERM_AAAA));
        _mm512_store_si512(q[i][h][b][1], _mm512_shuffle_epi32(row, _MM_PERM_BBBB));
        _mm512_store_si512(q[i][h][b][2], _mm512_shuffle_epi32(row, _MM_PERM_CCCC));
        _mm512_store_si512(q[i][h][b][3], _mm512_shuffle_epi32(row, _MM_PERM_DDDD));
      }
    }
    q_offset[h] = total * 128;
    q_scale[h] = unit * scale;
  }

  // Four rows -> four registers: out[w] holds word w of every lane, token by token.
  static void transpose_words(const __m512i* row, __m512i* out) {
    const __m512i low01 = _mm512_unpacklo_epi32(row[0], row[1]);
    const __m512i high01 = _mm512_unpackhi_epi32(row[0], row[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(row[2], row[3]);
    const __m512i high23 = _mm512_unpackhi_epi32(row[2], row[3]);
    out[0] = _mm512_unpacklo_epi64(low01, low23);
    out[1] = _mm512_unpackhi_epi64(low01, low23);
    out[2] = _mm512_unpacklo_epi64(high01, high23);
    out[3] = _mm512_unpackhi_epi64(high01, high23);
  }

  // Columns of one block of 16 tokens, of which `left` exist, against every query; sums of the
  // blocks before are added to.
  template <bool kTwoTerms>
  void score_columns(const std::byte* k, std::uint32_t block, std::uint32_t left) {
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i words[4][4] = {};
    for (std::uint32_t quad = 0; quad < 4; ++quad) {
      if (quad * 4 >= left) continue;
      __m512i row[4];
      for (std::uint32_t t = 0; t < 4; ++t) {
        row[t] = _mm512_xor_si512(load(k + (quad * 4 + t) * kRowBytes, block), flip);
      }
      transpose_words(row, words[quad]);
    }
    for (std::uint32_t h = 0; h < group; ++h) {
      __m512i low[4] = {}, high[4] = {};
      for (std::uint32_t w = 0; w < 4; ++w) {
        const __m512i query = _mm512_load_si512(q[0][h][block][w]);
        for (int i = 0; i < 4; ++i) low[i] = _mm512_dpbusd_epi32(low[i], words[i][w], query);
        if constexpr (kTwoTerms) {
          const __m512i upper = _mm512_load_si512(q[1][h][block][w]);
          for (int i = 0; i < 4; ++i) high[i] = _mm512_dpbusd_epi32(high[i], words[i][w], upper);
        }
      }
      for (int i = 0; i < 4; ++i) {
        if constexpr (kTwoTerms) low[i] = _mm512_add_epi32(low[i], _mm512_slli_epi32(high[i], 7));
        if (block != 0) low[i] = _mm512_add_epi32(low[i], _mm512_load_si512(sums[h][i]));
        _mm512_store_si512(sums[h][i], low[i]);
      }
      prefetch.step(spread.after[h]);
    }
  }

  template <bool kTwoTerms>
  void score(const std::byte* k, const float* k_scale, std::uint32_t n) {
    for (std::uint32_t t = 0; t < n; t += kLanes) {
      for (std::uint32_t block = 0; block < kBlocks; ++block) {
        score_columns<kTwoTerms>(k + t * kRowBytes, block, n - t);
      }
      const __m512 row_scale = _mm512_maskz_loadu_ps(token_mask(n, t), k_scale + t);
      for (std::uint32_t h = 0; h < group; ++h) {
        const __m512 x[4] = {_mm512_load_ps(sums[h][0]), _mm512_load_ps(sums[h][1]),
                             _mm512_load_ps(sums[h][2]), _mm512_load_ps(sums[h][3])};
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

  // Registers [kFirst, kFirst + kCount) of `interleave` for kHeads heads.
  template <std::uint32_t kFirst, std::uint32_t kHeads, std::uint32_t kCount>
  void add_quad(__m512i (&sum)[kHeads][kCount], std::uint32_t h0, std::uint32_t t,
                std::uint32_t block, const std::byte* v, std::uint32_t left) {
    __m512i values[4];
    interleave(v, left, block, values);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      std::int32_t four;
      std::memcpy(&four, weights[h0 + h] + t, sizeof(four));
      const __m512i weight = _mm512_set1_epi32(four);
      for (std::uint32_t i = 0; i < kCount; ++i) {
        sum[h][i] = _mm512_dpbusd_epi32(sum[h][i], weight, values[kFirst + i]);
      }
    }
  }

  template <std::uint32_t kHeads, std::uint32_t kFirst, std::uint32_t kCount>
  void value_strip(const std::byte* v, std::uint32_t n, std::uint32_t h0, std::uint32_t block) {
    __m512i sum[kHeads][kCount] = {};
    std::uint32_t t = 0;
    for (; t + 4 <= n; t += 4) {
      if (h0 == 0 && kFirst == 0) prefetch.step(1);
      add_quad<kFirst>(sum, h0, t, block, v + t * kRowBytes, 4);
    }
    if (t < n) add_quad<kFirst>(sum, h0, t, block, v + t * kRowBytes, n - t);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const __m512 unit = _mm512_set1_ps(weight_unit[h0 + h]);
      for (std::uint32_t i = 0; i < kCount; ++i) {
        float* o = state.o[h0 + h] + block * kSteps8 + (kFirst + i) * kLanes;
        const __m512 added = _mm512_cvtepi32_ps(sum[h][i]);
        _mm512_store_ps(o, _mm512_fmadd_ps(added, unit, _mm512_load_ps(o)));
      }
    }
  }

  // Eight heads take half of a block's columns at a time: their sums then fit the registers.
  template <std::uint32_t kHeads>
  void value_heads(const std::byte* v, std::uint32_t n, std::uint32_t h0) {
    constexpr std::uint32_t kCount = kHeads > 4 ? 2 : 4;
    for (std::uint32_t block = 0; block < kBlocks; ++block) {
      value_strip<kHeads, 0, kCount>(v, n, h0, block);
      if constexpr (kCount < 4) value_strip<kHeads, kCount, kCount>(v, n, h0, block);
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
    prefetch.step(2);  // the scales of 64 tokens, twice
    const std::byte* v = k + in.tile_bytes;
    std::uint32_t h = 0;
    for (; h + 8 <= group; h += 8) value_heads<8>(v, n, h);
    for (; h + 4 <= group; h += 4) value_heads<4>(v, n, h);
    for (; h < group; ++h) value_heads<1>(v, n, h);
  }

  // interleave leaves bytes 4 i .. 4 i + 3 of each 128-bit lane in register i.
  static std::uint32_t column(std::uint32_t d) {
    const std::uint32_t within = d % kSteps8;
    return d - within + within / 4 % 4 * kLanes + within / 16 * 4 + within % 4;
  }
};
