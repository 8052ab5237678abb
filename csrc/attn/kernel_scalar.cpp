// The reference: one float at a time, for any machine.
#include <cmath>

#include "attn/kernels.hpp"
#include "layout/elements.hpp"

namespace neo::attn::scalar {
namespace {

struct Vec {
  static constexpr std::uint32_t kWidth = 1;
  float value;

  static Vec zero() { return {0.0f}; }
  static Vec set1(float x) { return {x}; }
  static Vec load(const float* from) { return {*from}; }
  static void store(float* to, Vec x) { *to = x.value; }
  static Vec fma(Vec a, Vec b, Vec c) { return {a.value * b.value + c.value}; }
  static Vec mul(Vec a, Vec b) { return {a.value * b.value}; }
  static Vec max(Vec a, Vec b) { return {a.value > b.value ? a.value : b.value}; }
  static Vec exp(Vec x) { return {std::exp(x.value)}; }
  float reduce_add() const { return value; }
  float reduce_max() const { return value; }

  template <std::uint32_t kRows>
  static void reduce_rows(const Vec* rows, float* out) {
    for (std::uint32_t i = 0; i < kRows; ++i) out[i] = rows[i].value;
  }

  template <wire::DType D>
  static Vec load_kv(const std::byte* from) {
    if constexpr (D == wire::DType::float32) {
      return {*reinterpret_cast<const float*>(from)};
    } else if constexpr (D == wire::DType::float16) {
      return {layout::from_float16(*reinterpret_cast<const std::uint16_t*>(from))};
    } else if constexpr (D == wire::DType::int8) {
      return {static_cast<float>(*reinterpret_cast<const std::int8_t*>(from))};
    } else {
      return {layout::from_bfloat16(*reinterpret_cast<const std::uint16_t*>(from))};
    }
  }
};

#include "attn/paged_attention-inl.hpp"

}  // namespace

void kernel(const TaskInput& in, const TaskOutput& out) { attend_any(in, out); }

}  // namespace neo::attn::scalar
