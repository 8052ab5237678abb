#!/usr/bin/env bash
# Builds and runs the C++ tests. SANITIZE=thread|address,undefined builds them with a sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build/cpp}
mkdir -p "$BUILD"
cmake -S csrc -B "$BUILD" -DNEO_BUILD_MODULE=OFF -DNEO_BUILD_TESTS=ON \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNEO_SANITIZE="${SANITIZE:-}" >"$BUILD.log" 2>&1 ||
  { cat "$BUILD.log"; exit 1; }
cmake --build "$BUILD" -j "${JOBS:-2}" >"$BUILD.log" 2>&1 || { cat "$BUILD.log"; exit 1; }
ctest --test-dir "$BUILD" --output-on-failure
