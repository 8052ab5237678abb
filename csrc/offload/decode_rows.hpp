// Rows whose attention the cpu workers do, as the caller holds them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protos/wire.hpp"

namespace neo::offload {

struct DecodeRows {
  const std::uint32_t* slots;
  const std::uint32_t* seq_lens;
  std::size_t n;
};

// Throws std::out_of_range for rows that do not fit the geometry.
void check_rows(const wire::Geometry& geometry, const DecodeRows& rows);

}  // namespace neo::offload
