// Which kernel runs: a table, best first, checked against the CPU *and* the operating system.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attn/kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace neo::attn {
namespace {

bool always() { return true; }

#if defined(__x86_64__)

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned subleaf = 0) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// XCR0: which registers the operating system saves on a context switch. A CPU may have AVX-512
// that the kernel or hypervisor does not enable; its instructions then fault.
bool os_saves(std::uint64_t wanted) {
  constexpr unsigned kOsXsave = 1u << 27;
  if ((cpuid(1).ecx & kOsXsave) == 0) return false;
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const std::uint64_t saved = static_cast<std::uint64_t>(high) << 32 | low;
  return (saved & wanted) == wanted;
}

bool has_avx2() {
  constexpr unsigned kFma = 1u << 12, kF16c = 1u << 29, kAvx = 1u << 28, kAvx2 = 1u << 5;
  constexpr unsigned kLeaf1 = kFma | kF16c | kAvx;
  return (cpuid(1).ecx & kLeaf1) == kLeaf1 && (cpuid(7).ebx & kAvx2) != 0 && os_saves(0x6);
}

bool has_avx512() {
  constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr unsigned kAll = kF | kDq | kBw | kVl;
  return has_avx2() && (cpuid(7).ebx & kAll) == kAll && os_saves(0xe6);
}

bool has_avx512_bf16() {
  constexpr unsigned kVnni = 1u << 11, kBf16 = 1u << 5;
  return has_avx512() && (cpuid(7).ecx & kVnni) != 0 && (cpuid(7, 1).eax & kBf16) != 0;
}

#endif

std::string names() {
  std::string list;
  for (const Variant& variant : variants())
    list += std::string(list.empty() ? "" : ", ") + variant.name;
  return list;
}

}  // namespace

const std::vector<Variant>& variants() {
  static const std::vector<Variant> table = {
#if defined(__x86_64__)
      {"avx512_bf16", avx512_bf16::kernel, has_avx512_bf16},
      {"avx512", avx512::kernel, has_avx512},
      {"avx2", avx2::kernel, has_avx2},
#elif defined(__aarch64__)
      {"neon", neon::kernel, always},
#endif
      {"scalar", scalar::kernel, always},
  };
  return table;
}

const Variant& select_variant(const char* name) {
  std::string wanted = name;
  std::string source = "isa";
  if (wanted == "auto") {
    const char* forced = std::getenv("NEO_CPU_ISA");
    if (forced != nullptr && *forced != '\0') {
      wanted = forced;
      source = "NEO_CPU_ISA";
    }
  }
  for (const Variant& variant : variants()) {
    if (wanted == "auto" && variant.runnable()) return variant;
    if (wanted != variant.name) continue;
    if (variant.runnable()) return variant;
    throw std::invalid_argument(source + " is " + wanted + ", which this machine cannot run");
  }
  throw std::invalid_argument(source + " is " + wanted + "; it must be auto or one of " + names());
}

}  // namespace neo::attn
