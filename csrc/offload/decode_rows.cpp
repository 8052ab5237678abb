#include "offload/decode_rows.hpp"

#include <stdexcept>
#include <string>

namespace neo::offload {

void check_rows(const wire::Geometry& geometry, const DecodeRows& rows) {
  const std::uint64_t capacity = std::uint64_t{geometry.max_pages} * geometry.page_size;
  for (std::size_t i = 0; i < rows.n; ++i) {
    if (rows.slots[i] >= geometry.max_slots) {
      throw std::out_of_range("slot is " + std::to_string(rows.slots[i]) +
                              "; it must be below max_slots, " +
                              std::to_string(geometry.max_slots));
    }
    if (rows.seq_lens[i] == 0 || rows.seq_lens[i] > capacity) {
      throw std::out_of_range("seq_len is " + std::to_string(rows.seq_lens[i]) +
                              "; it must be from 1 to max_pages * page_size, " +
                              std::to_string(capacity));
    }
  }
}

}  // namespace neo::offload
