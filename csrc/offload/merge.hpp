// Merging the partial results of a sequence's splits by log-sum-exp (arXiv 2311.01282, section 3).
#pragma once

#include <cstdint>
#include <vector>

namespace neo::offload {

// One split's output area: O[group][head_dim] not normalised, m[group], l[group].
struct Partial {
  const float* o;
  const float* m;
  const float* l;

  static Partial at(const void* area, std::uint32_t group, std::uint32_t head_dim) {
    const auto* o = static_cast<const float*>(area);
    return {o, o + group * head_dim, o + group * head_dim + group};
  }
};

// out: [group][head_dim], normalised.
void merge(const std::vector<Partial>& partials, std::uint32_t group, std::uint32_t head_dim,
           float* out);

}  // namespace neo::offload
