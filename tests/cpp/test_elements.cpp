#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "layout/elements.hpp"

using neo::layout::bits_of;
using neo::layout::float_of;
using neo::wire::DType;

namespace {

// Random bits: every magnitude, subnormals, infinities; numbers that are none are left out.
std::vector<float> any_floats(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values;
  while (values.size() < n) {
    const float value = float_of(static_cast<std::uint32_t>(random()));
    if (!std::isnan(value)) values.push_back(value);
  }
  return values;
}

std::vector<float> normal_floats(std::size_t n, std::uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

void check_float16(const std::vector<float>& values) {
  std::vector<std::uint16_t> halves(values.size());
  neo::layout::from_floats(values.data(), halves.data(), DType::float16, values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    CHECK(halves[i] == neo::layout::to_float16(values[i]));
  }
}

void floats_become_float16_bit_for_bit() {
  // 1003: with a tail that fills no vector.
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    check_float16(any_floats(1003, seed));
    for (float scale : {1e-8f, 1e-5f, 1.0f, 3e4f}) check_float16(normal_floats(1003, seed, scale));
  }
}

void every_float16_becomes_its_float() {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(halves.size());
  neo::layout::to_floats(halves.data(), DType::float16, wide.data(), halves.size());
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const float right = neo::layout::from_float16(halves[i]);
    CHECK(std::isnan(right) ? std::isnan(wide[i]) : bits_of(wide[i]) == bits_of(right));
  }
}

void check_quantize(const std::vector<float>& row) {
  std::vector<std::int8_t> fast(row.size()), slow(row.size());
  const float a = neo::layout::quantize(row.data(), fast.data(), row.size());
  const float b = neo::layout::quantize_portable(row.data(), slow.data(), row.size());
  CHECK(bits_of(a) == bits_of(b));
  CHECK(fast == slow);
}

void quantising_is_the_same_with_and_without_vectors() {
  for (std::size_t n : {16, 64, 80, 96, 128, 256, 24}) {
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
      check_quantize(any_floats(n, seed));
      for (float scale : {1e-42f, 1e-30f, 1.0f, 1e4f, 1e37f}) {
        check_quantize(normal_floats(n, seed, scale));
      }
    }
    check_quantize(std::vector<float>(n, 0.0f));
    std::vector<float> spoiled(n, 1.0f);
    spoiled[3] = std::numeric_limits<float>::quiet_NaN();
    check_quantize(spoiled);
    spoiled[5] = -std::numeric_limits<float>::infinity();
    check_quantize(spoiled);
  }
}

void ties_go_to_even() {
  std::vector<float> row(16, 0.0f);
  row[0] = 127.0f;
  for (int i = 1; i < 16; ++i) row[i] = static_cast<float>(i) - 8.5f;
  std::vector<std::int8_t> bytes(16);
  CHECK(neo::layout::quantize(row.data(), bytes.data(), 16) == 1.0f);
  for (int i = 1; i < 16; ++i) CHECK(bytes[i] % 2 == 0);
}

}  // namespace

int main() {
  that("floats become float16 bit for bit", floats_become_float16_bit_for_bit);
  that("every float16 becomes its float", every_float16_becomes_its_float);
  that("quantising is the same with and without vectors",
       quantising_is_the_same_with_and_without_vectors);
  that("ties go to even", ties_go_to_even);
}
