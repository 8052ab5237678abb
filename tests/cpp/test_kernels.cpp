// Every kernel variant that runs here against float64, on small cases: for machines on which the
// Python tests do not run (AArch64 under qemu-user, sanitizer builds).
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "attn/paged_attention.hpp"
#include "check.hpp"
#include "layout/elements.hpp"

namespace {

using neo::attn::TaskInput;
using neo::wire::DType;
namespace layout = neo::layout;

struct Case {
  DType dtype;
  std::uint32_t group, head_dim, page_size, tokens;
};

// Pages of random K and V, and what the kernel should see in them.
struct Pages {
  std::vector<std::vector<std::byte>> pages;
  std::vector<const std::byte*> tiles;
  std::vector<double> k, v;
  std::uint64_t tile_bytes;
};

std::uint32_t bytes_of(DType dtype) {
  return dtype == DType::float32 ? 4 : (dtype == DType::int8 ? 1 : 2);
}

void store(const Case& c, std::byte* tile, std::uint32_t row, const std::vector<float>& values,
           std::vector<double>& seen) {
  std::byte* to = tile + row * c.head_dim * bytes_of(c.dtype);
  if (c.dtype == DType::int8) {
    auto* bytes = reinterpret_cast<std::int8_t*>(to);
    const float scale = layout::quantize(values.data(), bytes, c.head_dim);
    std::memcpy(tile + c.page_size * c.head_dim + row * sizeof(float), &scale, sizeof(scale));
    for (std::uint32_t d = 0; d < c.head_dim; ++d) seen.push_back(double{scale} * bytes[d]);
    return;
  }
  layout::from_floats(values.data(), to, c.dtype, c.head_dim);
  std::vector<float> back(c.head_dim);
  layout::to_floats(to, c.dtype, back.data(), c.head_dim);
  seen.insert(seen.end(), back.begin(), back.end());
}

Pages random_pages(const Case& c, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const std::uint32_t scale_bytes = c.dtype == DType::int8 ? 4 : 0;
  Pages made;
  made.tile_bytes = c.page_size * (c.head_dim * bytes_of(c.dtype) + scale_bytes);
  for (std::uint32_t t = 0; t < c.tokens; ++t) {
    if (t % c.page_size == 0) made.pages.emplace_back(2 * made.tile_bytes);
    std::byte* tile = made.pages.back().data();
    std::vector<float> row(c.head_dim);
    for (float& x : row) x = normal(random);
    store(c, tile, t % c.page_size, row, made.k);
    for (float& x : row) x = normal(random);
    store(c, tile + made.tile_bytes, t % c.page_size, row, made.v);
  }
  for (const auto& page : made.pages) made.tiles.push_back(page.data());
  return made;
}

// softmax(q k) v of one head, not normalised, against the kernel's o, m and l.
double worst_error(const Case& c, const Pages& pages, const float* q, const float* o, float m,
                   float l) {
  std::vector<double> scores(c.tokens), wanted(c.head_dim);
  double top = -1e300, sum = 0, largest = 0, worst = 0;
  for (std::uint32_t t = 0; t < c.tokens; ++t) {
    for (std::uint32_t d = 0; d < c.head_dim; ++d) {
      scores[t] += double{q[d]} * pages.k[t * c.head_dim + d];
    }
    scores[t] /= std::sqrt(double(c.head_dim));
    top = std::fmax(top, scores[t]);
  }
  for (std::uint32_t t = 0; t < c.tokens; ++t) {
    const double weight = std::exp(scores[t] - top);
    sum += weight;
    for (std::uint32_t d = 0; d < c.head_dim; ++d) {
      wanted[d] += weight * pages.v[t * c.head_dim + d];
    }
  }
  CHECK(std::fabs(m - top) < 0.1);
  for (std::uint32_t d = 0; d < c.head_dim; ++d) {
    largest = std::fmax(largest, std::fabs(wanted[d] / sum));
    worst = std::fmax(worst, std::fabs(o[d] / l - wanted[d] / sum));
  }
  return worst / largest;
}

void check_case(const Case& c, const neo::attn::Variant& variant, std::mt19937& random) {
  const Pages pages = random_pages(c, random);
  std::normal_distribution<float> normal;
  std::vector<float> q(c.group * c.head_dim), o(q.size()), m(c.group), l(c.group);
  for (float& x : q) x = layout::from_bfloat16(layout::to_bfloat16(normal(random)));
  TaskInput in{};
  in.q = q.data();
  in.scale = 1.0f / std::sqrt(float(c.head_dim));
  in.group = c.group;
  in.head_dim = c.head_dim;
  in.page_size = c.page_size;
  in.kv_dtype = c.dtype;
  in.tile_bytes = pages.tile_bytes;
  in.tiles = pages.tiles.data();
  in.n_tokens = c.tokens;
  variant.kernel(in, {o.data(), m.data(), l.data()});
  const double bound = c.dtype == DType::int8 ? 4e-2 : (c.dtype == DType::bfloat16 ? 4e-3 : 1e-5);
  for (std::uint32_t h = 0; h < c.group; ++h) {
    const std::uint32_t at = h * c.head_dim;
    CHECK(worst_error(c, pages, q.data() + at, o.data() + at, m[h], l[h]) < bound);
  }
}

void it_equals_float64(const neo::attn::Variant& variant) {
  std::mt19937 random(7);
  for (DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::int8}) {
    for (std::uint32_t head_dim : {64u, 80u, 96u, 128u, 256u}) {
      for (std::uint32_t group : {1u, 3u, 4u, 8u, 16u}) {
        for (std::uint32_t tokens : {1u, 31u, 64u, 97u}) {
          check_case({dtype, group, head_dim, 32, tokens}, variant, random);
          check_case({dtype, group, head_dim, 8, tokens}, variant, random);
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (const neo::attn::Variant& variant : neo::attn::variants()) {
    if (!variant.runnable()) continue;
    std::printf("%s: ", variant.name);
    that("every type, group and head size equals float64", [&] { it_equals_float64(variant); });
  }
}
