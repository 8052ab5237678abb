// What a Geometry may hold, and quantities derived from it.
#pragma once

#include <cstdint>

#include "protos/wire.hpp"

namespace neo::layout {

inline constexpr std::uint32_t kMaxGroup = 16;     // query heads per K/V head
inline constexpr std::uint32_t kMaxHeadDim = 256;  // elements
inline constexpr std::uint32_t kHeadDimStep = 16;  // head_dim is a multiple: one AVX-512 vector
inline constexpr std::uint32_t kMaxPageSize = 256;

// Throws std::invalid_argument that names the field, its value and the limit.
void validate_geometry(const wire::Geometry& geometry);

inline std::uint32_t element_size(std::uint32_t dtype) {
  switch (static_cast<wire::DType>(dtype)) {
    case wire::DType::float32:
      return 4;
    case wire::DType::float16:
    case wire::DType::bfloat16:
      return 2;
    case wire::DType::int8:
      return 1;
  }
  return 0;
}

inline std::uint32_t group_size(const wire::Geometry& g) { return g.n_heads / g.n_kv_heads; }

// Channels of attention work: those of the sub-batches, then one for each group of riders.
inline std::uint32_t n_channels(const wire::Geometry& g) { return wire::kChannels + g.ride_groups; }

inline std::uint32_t ride_channel(std::uint32_t group) { return wire::kChannels + group; }

inline std::uint32_t ride_tasks(const wire::Geometry& g) {
  return g.ride_capacity * g.n_kv_heads * wire::kRideSplits;
}

inline std::uint32_t max_tasks(const wire::Geometry& g, std::uint32_t channel) {
  return channel < wire::kChannels ? g.max_tasks : ride_tasks(g);
}

inline std::uint32_t n_ride_descs(const wire::Geometry& g) {
  return (g.n_plans + 1) * g.ride_groups;
}

// Index of a channel's first task among those of all channels, and of its first row of Q.
inline std::uint64_t first_task(const wire::Geometry& g, std::uint32_t channel) {
  if (channel < wire::kChannels) return std::uint64_t{channel} * g.max_tasks;
  return std::uint64_t{wire::kChannels} * g.max_tasks +
         std::uint64_t{channel - wire::kChannels} * ride_tasks(g);
}

inline std::uint64_t first_row(const wire::Geometry& g, std::uint32_t channel) {
  if (channel < wire::kChannels) return std::uint64_t{channel} * g.max_rows;
  return std::uint64_t{wire::kChannels} * g.max_rows +
         std::uint64_t{channel - wire::kChannels} * g.ride_capacity;
}

}  // namespace neo::layout
