#!/usr/bin/env bash
# Builds and runs the C++ tests. SANITIZE=thread|address,undefined builds them with a sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build/cpp}
mkdir -p "$BUILD"
cmake -S csrc -B "$BUILD" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNEO_BUILD_MODULE=OFF \
  -DNEO_BUILD_TESTS=ON -DNEO_SANITIZE="${SANITIZE:-}" >"$BUILD.log" 2>&1 ||
  { cat "$BUILD.log"; exit 1; }
cmake --build "$BUILD" -j "${JOBS:-2}" >"$BUILD.log" 2>&1 || { cat "$BUILD.log"; exit 1; }
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1 ${TSAN_OPTIONS:-}"
export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1 ${UBSAN_OPTIONS:-}"
ctest --test-dir "$BUILD" --output-on-failure "$@"
