// The algorithm, once, over a vector type that the including file defines.
//
// Included by each kernel_*.cpp inside `namespace neo::attn::NEO_ATTN_ISA { namespace { ... } }`:
// everything here has internal linkage there, because an inline function with external linkage
// would be merged by the linker across instruction sets and could bring AVX-512 code to a machine
// without. For the same reason nothing from the standard library is called here.
//
// The including file defines `struct Vec` (kWidth floats) with
//   zero, set1, load, store, load_kv<DType>, fma, mul, max, exp, reduce_add, reduce_max,
//   reduce_rows
// and the constants kTileTokens x kTileHeads = kWidth accumulators of a score tile.
//
// Two passes per block of kTokenBlock tokens, both in the first-level cache:
//   scores  [heads x tokens] tiles of dot products, each vector of K used for kTileHeads queries
//   values  O += P V in strips of columns with the accumulators in registers
// so every K and V tile comes from memory once for the whole query group. Meanwhile the next page
// is prefetched (tile_prefetch-inl.hpp).
#pragma once

#include "attn/tile_prefetch-inl.hpp"

constexpr float kMinusInfinity = -__builtin_inff();
constexpr std::uint32_t kMaxHeads = 16;
constexpr std::uint32_t kScoreStride = kTokenBlock;

inline std::uint32_t min_of(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

template <wire::DType D>
constexpr std::uint32_t kBytes = D == wire::DType::float32 ? 4 : (D == wire::DType::int8 ? 1 : 2);

// Rows [first, first + n) of one tile; n <= kTokenBlock.
struct Block {
  const std::byte* k;
  const std::byte* v;
  const float* k_scale;  // int8: of the same rows
  const float* v_scale;
  TilePrefetch* prefetch;  // of the page after this block's
  std::uint32_t n;
};

// A block reads 2 n row_bytes; half of its prefetches are issued with the scores, half with the
// values.
inline std::uint32_t prefetch_steps(std::uint32_t rows, std::uint32_t row_bytes) {
  return (rows * row_bytes + kStepLines * kLine - 1) / (kStepLines * kLine);
}

// scores[h][t0 .. t0 + kTokens) for kHeads queries. Tokens past the end repeat the last one, which
// keeps the tile full; their scores are overwritten or ignored.
template <wire::DType D, std::uint32_t kHeads>
void score_tile(const TaskInput& in, const Block& block, std::uint32_t h0, std::uint32_t t0,
                float* scores) {
  constexpr std::uint32_t kTokens = Vec::kWidth / kHeads == 0 ? 1 : Vec::kWidth / kHeads;
  const std::uint32_t stride = in.head_dim * kBytes<D>;
  const std::byte* k[kTokens];
  for (std::uint32_t t = 0; t < kTokens; ++t) k[t] = block.k + min_of(t0 + t, block.n - 1) * stride;
  const float* q = in.q + h0 * in.head_dim;
  Vec sum[kHeads * kTokens];
  for (auto& s : sum) s = Vec::zero();
  for (std::uint32_t d = 0; d < in.head_dim; d += Vec::kWidth) {
    Vec keys[kTokens];
    for (std::uint32_t t = 0; t < kTokens; ++t) {
      keys[t] = Vec::template load_kv<D>(k[t] + d * kBytes<D>);
    }
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const Vec query = Vec::load(q + h * in.head_dim + d);
      for (std::uint32_t t = 0; t < kTokens; ++t) {
        sum[h * kTokens + t] = Vec::fma(query, keys[t], sum[h * kTokens + t]);
      }
    }
  }
  float flat[kHeads * kTokens];
  Vec::template reduce_rows<kHeads * kTokens>(sum, flat);
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    for (std::uint32_t t = 0; t < kTokens; ++t) {
      scores[(h0 + h) * kScoreStride + t0 + t] = flat[h * kTokens + t];
    }
  }
}

template <wire::DType D, std::uint32_t kHeads>
void score_heads(const TaskInput& in, const Block& block, std::uint32_t h0, float* scores) {
  constexpr std::uint32_t kTokens = Vec::kWidth / kHeads == 0 ? 1 : Vec::kWidth / kHeads;
  const std::uint32_t steps = prefetch_steps(kTokens, in.head_dim * kBytes<D>);
  for (std::uint32_t t = 0; t < block.n; t += kTokens) {
    if (h0 == 0) block.prefetch->step(steps);
    score_tile<D, kHeads>(in, block, h0, t, scores);
  }
}

template <wire::DType D>
void score_block(const TaskInput& in, const Block& block, float* scores) {
  std::uint32_t h = 0;
  for (; h + 4 <= in.group; h += 4) score_heads<D, 4>(in, block, h, scores);
  if (h + 2 <= in.group) {
    score_heads<D, 2>(in, block, h, scores);
    h += 2;
  }
  if (h < in.group) score_heads<D, 1>(in, block, h, scores);
}

// Turns scores into weights exp(s - m) and rescales what was summed under the older maximum.
inline void soften(const TaskInput& in, const TaskOutput& out, std::uint32_t n, float* scores) {
  const Vec scale = Vec::set1(in.scale);
  for (std::uint32_t h = 0; h < in.group; ++h) {
    float* row = scores + h * kScoreStride;
    for (std::uint32_t t = n; t < kTokenBlock; ++t) row[t] = kMinusInfinity;
    Vec top = Vec::set1(kMinusInfinity);
    for (std::uint32_t t = 0; t < kTokenBlock; t += Vec::kWidth) {
      const Vec score = Vec::mul(Vec::load(row + t), scale);
      Vec::store(row + t, score);
      top = Vec::max(top, score);
    }
    const float block_max = top.reduce_max();
    if (block_max > out.m[h]) {
      // Nothing is summed yet when the maximum is still -infinity.
      const Vec older =
          out.m[h] == kMinusInfinity ? Vec::zero() : Vec::exp(Vec::set1(out.m[h] - block_max));
      float lanes[Vec::kWidth];
      Vec::store(lanes, older);
      out.l[h] *= lanes[0];
      float* o = out.o + h * in.head_dim;
      for (std::uint32_t d = 0; d < in.head_dim; d += Vec::kWidth) {
        Vec::store(o + d, Vec::mul(Vec::load(o + d), older));
      }
      out.m[h] = block_max;
    }
    const Vec minus_max = Vec::set1(-out.m[h]);
    const Vec one = Vec::set1(1.0f);
    Vec sum = Vec::zero();
    for (std::uint32_t t = 0; t < kTokenBlock; t += Vec::kWidth) {
      const Vec weight = Vec::exp(Vec::fma(Vec::load(row + t), one, minus_max));
      Vec::store(row + t, weight);
      sum = Vec::fma(weight, one, sum);
    }
    out.l[h] += sum.reduce_add();
  }
}

// rows[h][t] *= scale[t]: int8 rows are used as integers, their scales enter here.
inline void scale_tokens(std::uint32_t group, std::uint32_t n, const float* scale, float* rows) {
  for (std::uint32_t h = 0; h < group; ++h) {
    for (std::uint32_t t = 0; t < n; ++t) rows[h * kScoreStride + t] *= scale[t];
  }
}

// O[h0 .. h0 + kHeads)[d .. d + kVectors * kWidth) += P V.
template <wire::DType D, std::uint32_t kHeads, std::uint32_t kVectors>
void value_strip(const TaskInput& in, const TaskOutput& out, const Block& block, std::uint32_t h0,
                 std::uint32_t d, const float* weights) {
  const std::uint32_t row_bytes = in.head_dim * kBytes<D>;
  Vec sum[kHeads][kVectors];
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    for (std::uint32_t i = 0; i < kVectors; ++i) {
      sum[h][i] = Vec::load(out.o + (h0 + h) * in.head_dim + d + i * Vec::kWidth);
    }
  }
  constexpr std::uint32_t kStripBytes = kVectors * Vec::kWidth * kBytes<D>;
  constexpr std::uint32_t kRowsPerStep =
      kStripBytes >= kStepLines * kLine ? 1 : kStepLines * kLine / kStripBytes;
  for (std::uint32_t t = 0; t < block.n; ++t) {
    if (h0 == 0 && t % kRowsPerStep == 0) block.prefetch->step(1);
    const std::byte* row = block.v + t * row_bytes + d * kBytes<D>;
    Vec values[kVectors];
    for (std::uint32_t i = 0; i < kVectors; ++i) {
      values[i] = Vec::template load_kv<D>(row + i * Vec::kWidth * kBytes<D>);
    }
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const Vec weight = Vec::set1(weights[(h0 + h) * kScoreStride + t]);
      for (std::uint32_t i = 0; i < kVectors; ++i) {
        sum[h][i] = Vec::fma(weight, values[i], sum[h][i]);
      }
    }
  }
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    for (std::uint32_t i = 0; i < kVectors; ++i) {
      Vec::store(out.o + (h0 + h) * in.head_dim + d + i * Vec::kWidth, sum[h][i]);
    }
  }
}

template <wire::DType D, std::uint32_t kHeads>
void value_heads(const TaskInput& in, const TaskOutput& out, const Block& block, std::uint32_t h0,
                 const float* weights) {
  // Twelve sums for four heads: eight would just cover the latency of two FMA a cycle.
  constexpr std::uint32_t kWide = kHeads == 1 ? 4 : (kHeads == 4 ? 3 : 2);
  std::uint32_t d = 0;
  for (; d + kWide * Vec::kWidth <= in.head_dim; d += kWide * Vec::kWidth) {
    value_strip<D, kHeads, kWide>(in, out, block, h0, d, weights);
  }
  for (; d < in.head_dim; d += Vec::kWidth) {
    value_strip<D, kHeads, 1>(in, out, block, h0, d, weights);
  }
}

template <wire::DType D>
void value_block(const TaskInput& in, const TaskOutput& out, const Block& block,
                 const float* weights) {
  std::uint32_t h = 0;
  for (; h + 4 <= in.group; h += 4) value_heads<D, 4>(in, out, block, h, weights);
  if (h + 2 <= in.group) {
    value_heads<D, 2>(in, out, block, h, weights);
    h += 2;
  }
  if (h < in.group) value_heads<D, 1>(in, out, block, h, weights);
}

template <wire::DType D>
void attend(const TaskInput& in, const TaskOutput& out) {
  alignas(64) float scores[kMaxHeads * kScoreStride + 64];
  for (std::uint32_t i = 0; i < in.group * in.head_dim; ++i) out.o[i] = 0.0f;
  for (std::uint32_t h = 0; h < in.group; ++h) {
    out.m[h] = kMinusInfinity;
    out.l[h] = 0.0f;
  }
  const std::uint32_t row_bytes = in.head_dim * kBytes<D>;
  TilePrefetch prefetch;
  std::uint32_t done = 0;
  for (std::uint32_t page = 0; done < in.n_tokens; ++page) {
    const std::byte* tile = in.tiles[page];
    const std::uint32_t rows = min_of(in.page_size, in.n_tokens - done);
    done += rows;
    const bool last = done == in.n_tokens;
    prefetch.start(last ? in.next_tile : in.tiles[page + 1], in.tile_bytes,
                   last ? in.page_size : min_of(in.page_size, in.n_tokens - done), in.page_size,
                   row_bytes);
    for (std::uint32_t first = 0; first < rows; first += kTokenBlock) {
      const auto* k_scale = reinterpret_cast<const float*>(tile + in.page_size * row_bytes) + first;
      const auto* v_scale = reinterpret_cast<const float*>(
          reinterpret_cast<const std::byte*>(k_scale) + in.tile_bytes);
      const std::byte* k = tile + first * row_bytes;
      const Block block{k,       k + in.tile_bytes, k_scale,
                        v_scale, &prefetch,         min_of(kTokenBlock, rows - first)};
      score_block<D>(in, block, scores);
      if constexpr (D == wire::DType::int8) scale_tokens(in.group, block.n, k_scale, scores);
      soften(in, out, block.n, scores);
      if constexpr (D == wire::DType::int8) {
        scale_tokens(in.group, block.n, v_scale, scores);
        prefetch.step(1);  // the scales of 32 tokens, twice
      }
      value_block<D>(in, out, block, scores);
    }
  }
}

inline void attend_any(const TaskInput& in, const TaskOutput& out) {
  switch (in.kv_dtype) {
    case wire::DType::float32:
      return attend<wire::DType::float32>(in, out);
    case wire::DType::float16:
      return attend<wire::DType::float16>(in, out);
    case wire::DType::bfloat16:
      return attend<wire::DType::bfloat16>(in, out);
    case wire::DType::int8:
      return attend<wire::DType::int8>(in, out);
  }
}
