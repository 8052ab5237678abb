// Runs one task block by block. Included inside the anonymous namespace of the AVX-512 kernels.
#pragma once

#include "attn/vector512-inl.hpp"

inline std::uint32_t min_of(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

template <class Task>
void attend_task(const TaskInput& in, const TaskOutput& out) {
  Task task(in);
  for (std::uint32_t page = 0, done = 0; done < in.n_tokens; ++page) {
    const std::uint32_t rows = min_of(in.page_size, in.n_tokens - done);
    done += rows;
    const bool last = done == in.n_tokens;
    task.prefetch.start(last ? in.next_tile : in.tiles[page + 1], in.tile_bytes,
                        last ? in.page_size : min_of(in.page_size, in.n_tokens - done),
                        in.page_size, Task::kRowBytes);
    for (std::uint32_t first = 0; first < rows; first += kTokens) {
      task.block(in.tiles[page], in, first, min_of(kTokens, rows - first));
    }
  }
  for (std::uint32_t h = 0; h < in.group; ++h) {
    for (std::uint32_t d = 0; d < in.head_dim; ++d) {
      out.o[h * in.head_dim + d] = task.state.o[h][Task::column(d)];
    }
    out.m[h] = task.state.m[h];
    out.l[h] = _mm512_reduce_add_ps(_mm512_load_ps(task.state.l[h]));
  }
}
