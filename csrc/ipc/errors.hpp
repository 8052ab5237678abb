// The extension's error tree; bindings map it to Python one to one.
//
//   NativeError            (RuntimeError)
//   ├── LayoutMismatchError  a segment of another build or geometry; says both values
//   └── SharedMemoryError    too little room, or the kernel refused; "needs X, has Y"
//
// Bad arguments are std::invalid_argument (ValueError) and std::out_of_range (IndexError).
#pragma once

#include <stdexcept>

namespace neo {

struct NativeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct LayoutMismatchError : NativeError {
  using NativeError::NativeError;
};

struct SharedMemoryError : NativeError {
  using NativeError::NativeError;
};

}  // namespace neo
