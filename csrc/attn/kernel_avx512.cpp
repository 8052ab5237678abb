// AVX-512 F, BW, DQ and VL: sixteen floats at a time, for every type of K and V.
#include <immintrin.h>

#include <cstring>

#include "attn/kernels.hpp"

namespace neo::attn::avx512 {
namespace {

#include "attn/attend512-inl.hpp"
#include "attn/wide512-inl.hpp"

template <wire::DType D>
void attend(const TaskInput& in, const TaskOutput& out) {
  switch (in.head_dim) {
    case 64:
      return attend_task<WideTask<D, 64>>(in, out);
    case 80:
      return attend_task<WideTask<D, 80>>(in, out);
    case 96:
      return attend_task<WideTask<D, 96>>(in, out);
    case 128:
      return attend_task<WideTask<D, 128>>(in, out);
    case 256:
      return attend_task<WideTask<D, 256>>(in, out);
    default:  // multiples of 16 that no model of ours has
      return avx2::kernel(in, out);
  }
}

}  // namespace

void kernel(const TaskInput& in, const TaskOutput& out) {
  switch (in.kv_dtype) {
    case wire::DType::float32:
      return attend<wire::DType::float32>(in, out);
    case wire::DType::float16:
      return attend<wire::DType::float16>(in, out);
    case wire::DType::bfloat16:
      return attend<wire::DType::bfloat16>(in, out);
    case wire::DType::int8:
      return attend<wire::DType::int8>(in, out);
  }
}

}  // namespace neo::attn::avx512
