// The sequences segment: sampling parameters, block tables, page tables, biases.
#pragma once

#include <cstdint>
#include <memory>

#include "ipc/shm_segment.hpp"
#include "layout/segment_layout.hpp"
#include "protos/wire.hpp"

namespace neo::layout {

class Sequences {
 public:
  Sequences(std::shared_ptr<ipc::Segment> segment, const wire::Geometry& geometry)
      : segment_(std::move(segment)), geometry_(geometry), layout_(geometry) {
    check_segment(*segment_, wire::SegmentKind::sequences, geometry);
  }

  const wire::Geometry& geometry() const { return geometry_; }
  wire::SlotParams* params() const {
    return reinterpret_cast<wire::SlotParams*>(segment_->data() + layout_.params);
  }
  std::uint32_t* block_table() const { return table(layout_.block_table); }
  std::uint32_t* page_table() const { return table(layout_.page_table); }
  wire::TokenBias* bias() const {
    return reinterpret_cast<wire::TokenBias*>(segment_->data() + layout_.bias);
  }
  // [max_pages]
  const std::uint32_t* pages_of(std::uint32_t slot) const {
    return page_table() + std::uint64_t{slot} * geometry_.max_pages;
  }

 private:
  std::uint32_t* table(std::uint64_t offset) const {
    return reinterpret_cast<std::uint32_t*>(segment_->data() + offset);
  }

  std::shared_ptr<ipc::Segment> segment_;
  wire::Geometry geometry_;
  SequencesLayout layout_;
};

}  // namespace neo::layout
