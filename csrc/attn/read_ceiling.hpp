// What this machine's memory can give to readers: the yardstick of the attention benchmark.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace neo::attn {

// Reads all of `data` once per pattern with `threads` threads, each over its own part; bytes per
// second by pattern. Nothing shorter than a few hundred MiB says anything: caches hold it.
std::vector<std::pair<std::string, double>> read_ceiling(const std::byte* data, std::size_t size,
                                                         unsigned threads);

}  // namespace neo::attn
