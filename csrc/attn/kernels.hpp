// One entry per translation unit; dispatch.cpp makes the table. A new instruction set is one file
// like kernel_avx2.cpp, its flags in CMakeLists.txt, a declaration here and a row in the table.
#pragma once

#include "attn/paged_attention.hpp"

namespace neo::attn {

namespace scalar {
void kernel(const TaskInput& in, const TaskOutput& out);
}
namespace neon {
void kernel(const TaskInput& in, const TaskOutput& out);
}
namespace avx2 {
void kernel(const TaskInput& in, const TaskOutput& out);
}
namespace avx512 {
void kernel(const TaskInput& in, const TaskOutput& out);
}
namespace avx512_bf16 {
void kernel(const TaskInput& in, const TaskOutput& out);
}

}  // namespace neo::attn
