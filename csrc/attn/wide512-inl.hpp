// K and V of any type, widened to float32 and multiplied by FMA, sixteen at a time. Included inside
// the anonymous namespace of kernel_avx512.cpp, after vector512-inl.hpp.
//
// The structure is bf16-inl.hpp's: four rows of K stay in registers, widened once for the whole
// query group, while the queries pass; each query's four sums fold to one register.
#pragma once

#include "attn/vector512-inl.hpp"

template <wire::DType D>
inline __m512 widen(const std::byte* from) {
  if constexpr (D == wire::DType::float32) {
    return _mm512_loadu_ps(from);
  } else if constexpr (D == wire::DType::int8) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  } else {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if constexpr (D == wire::DType::float16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
}

template <wire::DType D>
constexpr std::uint32_t kBytes = D == wire::DType::float32 ? 4 : (D == wire::DType::int8 ? 1 : 2);

template <wire::DType D, std::uint32_t kDim>
struct WideTask {
  static constexpr std::uint32_t kBlocks = kDim / kLanes;
  static constexpr std::uint32_t kRowBytes = kDim * kBytes<D>;
  static constexpr std::uint32_t kStep = kLanes * kBytes<D>;  // bytes of a register's elements
  static constexpr std::uint32_t kPart = 4;                   // registers of K per token

  alignas(64) float folded[kMaxHeads][4][kLanes];
  alignas(64) float scores[kMaxHeads][kTokens];
  alignas(64) float q[kMaxHeads][kDim];
  State<kDim> state;
  std::uint32_t group;
  float scale;
  Spread spread;
  TilePrefetch prefetch;

  explicit WideTask(const TaskInput& in)
      : state(in.group),
        group(in.group),
        scale(in.scale),
        spread(in.group, (kRowBytes + kLine - 1) / kLine) {
    std::memset(folded, 0, sizeof(folded));
    std::memcpy(q, in.q, sizeof(q[0]) * group);
  }

  template <std::uint32_t kFirst>
  void score_rows(const std::byte* k, std::uint32_t quad) {
    constexpr std::uint32_t kEnd = kFirst + kPart < kBlocks ? kFirst + kPart : kBlocks;
    __m512 rows[4][kPart];
    for (std::uint32_t t = 0; t < 4; ++t) {
      for (std::uint32_t b = kFirst; b < kEnd; ++b) {
        rows[t][b - kFirst] = widen<D>(k + t * kRowBytes + b * kStep);
      }
    }
    for (std::uint32_t h = 0; h < group; ++h) {
      __m512 sum[4] = {};
      for (std::uint32_t b = kFirst; b < kEnd; ++b) {
        const __m512 query = _mm512_load_ps(q[h] + b * kLanes);
        for (std::uint32_t t = 0; t < 4; ++t) {
          sum[t] = _mm512_fmadd_ps(rows[t][b - kFirst], query, sum[t]);
        }
      }
      __m512 part = fold_tokens<FloatSum>(sum);
      if constexpr (kFirst != 0) part = _mm512_add_ps(part, _mm512_load_ps(folded[h][quad]));
      _mm512_store_ps(folded[h][quad], part);
      if (kFirst == 0) prefetch.step(spread.after[h]);
    }
    if constexpr (kEnd < kBlocks) score_rows<kEnd>(k, quad);
  }

  // `row_scale`: of int8 rows.
  void score(const std::byte* k, const float* row_scale, std::uint32_t n) {
    for (std::uint32_t t = 0; t < n; t += kLanes) {
      for (std::uint32_t quad = 0; quad < 4 && t + quad * 4 < n; ++quad) {
        score_rows<0>(k + (t + quad * 4) * kRowBytes, quad);
      }
      __m512 factor = _mm512_set1_ps(scale);
      if constexpr (D == wire::DType::int8) {
        factor = _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(token_mask(n, t), row_scale + t));
      }
      for (std::uint32_t h = 0; h < group; ++h) {
        const __m512 x[4] = {_mm512_load_ps(folded[h][0]), _mm512_load_ps(folded[h][1]),
                             _mm512_load_ps(folded[h][2]), _mm512_load_ps(folded[h][3])};
        _mm512_store_ps(scores[h] + t, _mm512_mul_ps(fold_lanes<FloatSum>(x), factor));
      }
    }
  }

  void weigh(const float* row_scale, std::uint32_t n) {
    for (std::uint32_t h = 0; h < group; ++h) {
      __m512 x[kGroups];
      for (std::uint32_t i = 0; i < kGroups; ++i) x[i] = _mm512_load_ps(scores[h] + i * kLanes);
      soften(state, h, n, x);
      __m512 sum = _mm512_setzero_ps();
      for (std::uint32_t i = 0; i < kGroups; ++i) {
        sum = _mm512_add_ps(sum, x[i]);
        if constexpr (D == wire::DType::int8) {
          const __mmask16 kept = token_mask(n, i * kLanes);
          x[i] = _mm512_mul_ps(x[i], _mm512_maskz_loadu_ps(kept, row_scale + i * kLanes));
        }
        _mm512_store_ps(scores[h] + i * kLanes, x[i]);
      }
      state.add_to_sum(h, sum);
    }
  }

  template <std::uint32_t kHeads, std::uint32_t kVectors>
  void value_strip(const std::byte* v, std::uint32_t n, std::uint32_t h0, std::uint32_t block) {
    constexpr std::uint32_t kStripBytes = kVectors * kStep;
    constexpr std::uint32_t kRowsPerStep =
        kStripBytes >= kStepLines * kLine ? 1 : kStepLines * kLine / kStripBytes;
    __m512 sum[kHeads][kVectors];
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      for (std::uint32_t i = 0; i < kVectors; ++i) {
        sum[h][i] = _mm512_load_ps(state.o[h0 + h] + (block + i) * kLanes);
      }
    }
    for (std::uint32_t t = 0; t < n; ++t) {
      if (h0 == 0 && t % kRowsPerStep == 0) prefetch.step(1);
      __m512 values[kVectors];
      for (std::uint32_t i = 0; i < kVectors; ++i) {
        values[i] = widen<D>(v + t * kRowBytes + (block + i) * kStep);
      }
      for (std::uint32_t h = 0; h < kHeads; ++h) {
        const __m512 weight = _mm512_set1_ps(scores[h0 + h][t]);
        for (std::uint32_t i = 0; i < kVectors; ++i) {
          sum[h][i] = _mm512_fmadd_ps(values[i], weight, sum[h][i]);
        }
      }
    }
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      for (std::uint32_t i = 0; i < kVectors; ++i) {
        _mm512_store_ps(state.o[h0 + h] + (block + i) * kLanes, sum[h][i]);
      }
    }
  }

  template <std::uint32_t kHeads, std::uint32_t kWide>
  void value_heads(const std::byte* v, std::uint32_t n, std::uint32_t h0) {
    constexpr std::uint32_t kVectors = kWide < kBlocks ? kWide : kBlocks;
    std::uint32_t block = 0;
    for (; block + kVectors <= kBlocks; block += kVectors) {
      value_strip<kHeads, kVectors>(v, n, h0, block);
    }
    for (; block < kBlocks; ++block) value_strip<kHeads, 1>(v, n, h0, block);
  }

  void value(const std::byte* v, std::uint32_t n) {
    std::uint32_t h = 0;
    for (; h + 8 <= group; h += 8) value_heads<8, 2>(v, n, h);
    for (; h + 4 <= group; h += 4) value_heads<4, 4>(v, n, h);
    for (; h < group; ++h) value_heads<1, 8>(v, n, h);
  }

  void block(const std::byte* tile, const TaskInput& in, std::uint32_t first, std::uint32_t n) {
    const auto scales = [&](const std::byte* rows) {
      return reinterpret_cast<const float*>(rows + in.page_size * kRowBytes) + first;
    };
    const std::byte* k = tile + first * kRowBytes;
    score(k, scales(tile), n);
    weigh(scales(tile + in.tile_bytes), n);
    if constexpr (D == wire::DType::int8) prefetch.step(2);  // the scales of 64 tokens, twice
    value(k + in.tile_bytes, n);
  }

  static std::uint32_t column(std::uint32_t d) { return d; }
};
