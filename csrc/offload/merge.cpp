#include "offload/merge.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace neo::offload {

void merge(const std::vector<Partial>& partials, std::uint32_t group, std::uint32_t head_dim,
           float* out) {
  std::fill(out, out + group * head_dim, 0.0f);
  for (std::uint32_t head = 0; head < group; ++head) {
    float top = -std::numeric_limits<float>::infinity();
    for (const Partial& p : partials) top = std::max(top, p.m[head]);
    float sum = 0.0f;
    float* row = out + head * head_dim;
    for (const Partial& p : partials) {
      const float weight = std::exp(p.m[head] - top);
      sum += weight * p.l[head];
      const float* o = p.o + head * head_dim;
      for (std::uint32_t d = 0; d < head_dim; ++d) row[d] += weight * o[d];
    }
    const float scale = 1.0f / sum;
    for (std::uint32_t d = 0; d < head_dim; ++d) row[d] *= scale;
  }
}

}  // namespace neo::offload
