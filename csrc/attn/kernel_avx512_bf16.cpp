// AVX-512 with BF16 and VNNI: dot products of 16-bit and 8-bit elements. What these do not fit
// (float32 and float16 caches, queries that are not bf16, unusual head sizes) goes to the AVX-512
// kernel.
#include <immintrin.h>

#include <cstring>

#include "attn/kernels.hpp"

namespace neo::attn::avx512_bf16 {
namespace {

#include "attn/attend512-inl.hpp"
#include "attn/bf16-inl.hpp"
#include "attn/int8-inl.hpp"

template <template <std::uint32_t> class Task>
bool attend_dim(const TaskInput& in, const TaskOutput& out) {
  switch (in.head_dim) {
    case 64:
      attend_task<Task<64>>(in, out);
      return true;
    case 80:
      attend_task<Task<80>>(in, out);
      return true;
    case 96:
      attend_task<Task<96>>(in, out);
      return true;
    case 128:
      attend_task<Task<128>>(in, out);
      return true;
    case 256:
      attend_task<Task<256>>(in, out);
      return true;
    default:
      return false;
  }
}

// On a Xeon with AMX the FMA kernel reads 1.1 to 1.2 times as fast (docs/decisions.md); on Zen 4 it
// is the other way round.
bool dot_products_pay() {
  static const bool pay = __builtin_cpu_is("intel") == 0;
  return pay;
}

}  // namespace

void kernel(const TaskInput& in, const TaskOutput& out) {
  if (in.kv_dtype == wire::DType::bfloat16 && dot_products_pay() && queries_are_bf16(in) &&
      attend_dim<Bf16Task>(in, out)) {
    return;
  }
  if (in.kv_dtype == wire::DType::int8 && attend_dim<Int8Task>(in, out)) return;
  avx512::kernel(in, out);
}

}  // namespace neo::attn::avx512_bf16
