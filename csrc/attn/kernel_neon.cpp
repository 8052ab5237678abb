// NEON (every AArch64 CPU): four floats at a time.
#include <arm_neon.h>

#include "attn/kernels.hpp"

namespace neo::attn::neon {
namespace {

struct Vec {
  static constexpr std::uint32_t kWidth = 4;
  float32x4_t value;

  static Vec zero() { return {vdupq_n_f32(0.0f)}; }
  static Vec set1(float x) { return {vdupq_n_f32(x)}; }
  static Vec load(const float* from) { return {vld1q_f32(from)}; }
  static void store(float* to, Vec x) { vst1q_f32(to, x.value); }
  static Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.value, a.value, b.value)}; }
  static Vec mul(Vec a, Vec b) { return {vmulq_f32(a.value, b.value)}; }
  static Vec max(Vec a, Vec b) { return {vmaxq_f32(a.value, b.value)}; }

  // As in kernel_avx2.cpp.
  static Vec exp(Vec x) {
    const float32x4_t low = vdupq_n_f32(-87.0f);
    const uint32x4_t kept = vcgeq_f32(x.value, low);
    const float32x4_t clamped = vmaxq_f32(x.value, low);
    const float32x4_t n = vrndnq_f32(vmulq_n_f32(clamped, 1.44269504f));
    float32x4_t f = vfmsq_n_f32(clamped, n, 0.693359375f);
    f = vfmsq_n_f32(f, n, -2.12194440e-4f);
    float32x4_t p = vdupq_n_f32(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
      p = vfmaq_f32(vdupq_n_f32(c), p, f);
    }
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    const uint32x4_t bits = vreinterpretq_u32_f32(vmulq_f32(p, vreinterpretq_f32_s32(power)));
    return {vreinterpretq_f32_u32(vandq_u32(kept, bits))};
  }

  float reduce_add() const { return vaddvq_f32(value); }
  float reduce_max() const { return vmaxvq_f32(value); }

  template <std::uint32_t kRows>
  static void reduce_rows(const Vec* r, float* out) {
    static_assert(kRows == 4);
    vst1q_f32(out,
              vpaddq_f32(vpaddq_f32(r[0].value, r[1].value), vpaddq_f32(r[2].value, r[3].value)));
  }

  template <wire::DType D>
  static Vec load_kv(const std::byte* from) {
    if constexpr (D == wire::DType::float32) {
      return {vld1q_f32(reinterpret_cast<const float*>(from))};
    } else if constexpr (D == wire::DType::float16) {
      const uint16x4_t halves = vld1_u16(reinterpret_cast<const std::uint16_t*>(from));
      return {vcvt_f32_f16(vreinterpret_f16_u16(halves))};
    } else if constexpr (D == wire::DType::int8) {
      // Four bytes by a word load: a vector load would read past the row.
      std::uint32_t word;
      __builtin_memcpy(&word, from, sizeof(word));
      const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(word));
      return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))};
    } else {
      const uint16x4_t halves = vld1_u16(reinterpret_cast<const std::uint16_t*>(from));
      return {vreinterpretq_f32_u32(vshll_n_u16(halves, 16))};
    }
  }
};

#include "attn/paged_attention-inl.hpp"

}  // namespace

void kernel(const TaskInput& in, const TaskOutput& out) { attend_any(in, out); }

}  // namespace neo::attn::neon
