#include "layout/geometry.hpp"

#include <stdexcept>
#include <string>

namespace neo::layout {
namespace {

void require_range(const char* field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
  if (value >= low && value <= high) return;
  throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) +
                              "; it must be from " + std::to_string(low) + " to " +
                              std::to_string(high));
}

void require_float(const char* field, std::uint32_t value,
                   const char* choices = " or 2 (bfloat16)") {
  if (value <= static_cast<std::uint32_t>(wire::DType::bfloat16)) return;
  throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) +
                              "; it must be 0 (float32), 1 (float16)" + choices);
}

void require_multiple(const char* field, std::uint32_t value, const char* of_field,
                      std::uint32_t of) {
  if (of != 0 && value % of == 0) return;
  throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) +
                              "; it must be a multiple of " + of_field + ", " + std::to_string(of));
}

void validate_model(const wire::Geometry& g) {
  require_range("n_layers", g.n_layers, 1, 4096);
  require_range("n_heads", g.n_heads, 1, 1024);
  require_range("n_kv_heads", g.n_kv_heads, 1, 1024);
  require_multiple("n_heads", g.n_heads, "n_kv_heads", g.n_kv_heads);
  require_range("n_heads / n_kv_heads", group_size(g), 1, kMaxGroup);
  require_range("head_dim", g.head_dim, kHeadDimStep, kMaxHeadDim);
  require_multiple("head_dim", g.head_dim, "the vector width", kHeadDimStep);
  require_float("act_dtype", g.act_dtype);
  if (g.kv_dtype != static_cast<std::uint32_t>(wire::DType::int8)) {
    require_float("kv_dtype", g.kv_dtype, ", 2 (bfloat16) or 3 (int8)");
  }
}

void validate_riders(const wire::Geometry& g) {
  if (g.ride_groups != 0)
    require_range("ride_groups", g.ride_groups, g.n_layers + 1, g.n_layers + 1);
  require_range("ride_capacity", g.ride_capacity, g.ride_groups != 0 ? 1 : 0,
                g.ride_groups != 0 ? 1u << 12 : 0);
}

}  // namespace

void validate_geometry(const wire::Geometry& g) {
  constexpr std::uint32_t kMany = 1u << 24;       // keeps every product below within 64 bits
  constexpr std::uint32_t kMostPages = 1u << 28;  // and the CPU-cache's, see below
  validate_model(g);
  validate_riders(g);
  require_range("block_size", g.block_size, 1, 4096);
  require_range("page_size", g.page_size, 8, kMaxPageSize);
  require_range("n_pages", g.n_pages, 0, kMostPages);
  require_range("max_slots", g.max_slots, 1, kMany);
  require_range("max_rows", g.max_rows, 1, 1u << 16);
  require_range("max_tokens", g.max_tokens, 1, kMany);
  require_range("max_blocks", g.max_blocks, 1, kMany);
  require_range("max_pages", g.max_pages, 1, kMany);
  require_range("max_tasks", g.max_tasks, std::uint64_t{g.max_rows} * g.n_kv_heads, kMany);
  require_range("max_swaps", g.max_swaps, 0, kMany);
  require_range("n_plans", g.n_plans, 1, 1024);
  require_range("max_workers", g.max_workers, 1, wire::kTaskFieldMask + 1);
  require_range("world_size", g.world_size, 1, 63);  // lock bytes 1 to 63 of the control segment
  require_range("rank", g.rank, 0, g.world_size - 1);
  require_range("spin_us", g.spin_us, 0, 1'000'000);
  require_range("lease_us", g.lease_us, 1, 60'000'000);
  require_range("max_logprobs", g.max_logprobs, 0, 1024);
  // Pages, layers, heads, and a tile of up to 2^18 bytes, twice: more than 64 bits if all are
  // large.
  const std::uint64_t tiles = std::uint64_t{g.n_pages} * g.n_layers * g.n_kv_heads;  // < 2^51
  require_range("n_pages * n_layers * n_kv_heads", tiles, 0, 1ULL << 43);
}

}  // namespace neo::layout
