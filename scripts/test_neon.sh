#!/usr/bin/env bash
# Cross-compiles the kernels for AArch64 and runs their test under qemu-user.
# Needs g++-aarch64-linux-gnu and qemu-user. CXX and RUN override the compiler and the emulator.
set -euo pipefail
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build/neon}
mkdir -p "$BUILD"
"${CXX:-aarch64-linux-gnu-g++}" -std=c++17 -O2 -Wall -Wextra -static -I csrc -I . -I tests/cpp \
  csrc/attn/dispatch.cpp csrc/attn/kernel_scalar.cpp csrc/attn/kernel_neon.cpp \
  csrc/layout/elements.cpp tests/cpp/test_kernels.cpp -o "$BUILD/test_kernels"
# Not "... | grep -q", which would end the test early with SIGPIPE.
"${RUN:-qemu-aarch64}" "$BUILD/test_kernels" | tee "$BUILD/test_kernels.log"
grep "^neon: .* yes$" "$BUILD/test_kernels.log" >/dev/null
