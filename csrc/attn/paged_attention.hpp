// Decode attention of one task: the query group of one K/V head over a token range of paged K/V.
//
// A kernel sees tiles, not pages: who calls it resolves the page table into tile addresses, so that
// the cache's layout is known in one place (layout/segment_layout.hpp) and no kernel follows an
// index that another process wrote.
//
// The result is un-normalised, so that the splits of one sequence can be merged:
//   m[g] = max_t s,   l[g] = sum_t exp(s - m[g]),   o[g] = sum_t exp(s - m[g]) v[t],   s =
//   q[g].k[t]
// (online softmax: arXiv 1805.02867; merging splits: arXiv 2311.01282.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protos/wire.hpp"

namespace neo::attn {

// Tokens whose scores are in flight at once. K and V of 32 tokens x 128 x 2 bytes fill half of a
// 32 KiB first-level cache, which leaves room for the queries and the output.
inline constexpr std::uint32_t kTokenBlock = 32;

struct TaskInput {
  const float* q;  // [group][head_dim], as the activations hold it
  float scale;     // of the scores, 1/sqrt(head_dim)
  std::uint32_t group;
  std::uint32_t head_dim;
  std::uint32_t page_size;
  wire::DType kv_dtype;
  // From a page's K tile to its V tile. A tile is [page_size][head_dim] rows and, for int8, then
  // float32 scale[page_size], one per row: row = scale * integers.
  std::uint64_t tile_bytes;
  const std::byte* const* tiles;  // K tile of each page of the range
  std::uint32_t n_tokens;         // of the range, at least 1; the last page may be partly filled
  // K tile that this thread is likely to read after this task, or nullptr: only prefetched.
  const std::byte* next_tile;
};

struct TaskOutput {
  float* o;  // [group][head_dim]
  float* m;  // [group]
  float* l;  // [group]
};

using Kernel = void (*)(const TaskInput&, const TaskOutput&);

struct Variant {
  const char* name;
  Kernel kernel;
  bool (*runnable)();  // CPU and operating system
};

// Every variant of this build, best first; the last is "scalar", which always runs.
const std::vector<Variant>& variants();

// "auto": the best that runs here, or what NEO_CPU_ISA names. Throws std::invalid_argument for an
// unknown name or one that this machine cannot run.
const Variant& select_variant(const char* name);

}  // namespace neo::attn
