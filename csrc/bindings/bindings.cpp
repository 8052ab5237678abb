#include "bindings/bindings.hpp"

PYBIND11_MODULE(_core, module) {
  module.doc() = "Shared-memory contract, rings and CPU attention; see _core.pyi.";
  neo::bindings::bind_layout(module);
  neo::bindings::bind_rings(module);
  neo::bindings::bind_attention(module);
  neo::bindings::bind_offload(module);
  neo::bindings::bind_timeline(module);
}
