#include "ipc/numa.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace neo::ipc {

cpu_set_t parse_cpu_list(const std::string& text) {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::istringstream parts(text);
  std::string part;
  while (std::getline(parts, part, ',')) {
    char* end = nullptr;
    const long first = std::strtol(part.c_str(), &end, 10);
    if (end == part.c_str()) continue;
    const long last = *end == '-' ? std::strtol(end + 1, nullptr, 10) : first;
    for (long core = std::max(first, 0L); core <= last && core < CPU_SETSIZE; ++core) {
      CPU_SET(core, &set);
    }
  }
  return set;
}

std::vector<cpu_set_t> usable_nodes(const std::string& folder) {
  constexpr int kMaxNodes = 1024;
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return {};
  std::ifstream online(folder + "/online");
  std::string numbers;
  std::getline(online, numbers);
  const cpu_set_t nodes = parse_cpu_list(numbers);  // node numbers have the same form
  std::vector<cpu_set_t> usable;
  for (int node = 0; node < kMaxNodes && node < CPU_SETSIZE; ++node) {
    if (!CPU_ISSET(node, &nodes)) continue;
    std::ifstream file(folder + "/node" + std::to_string(node) + "/cpulist");
    std::string list;
    std::getline(file, list);
    cpu_set_t cores = parse_cpu_list(list);
    CPU_AND(&cores, &cores, &mask);
    if (CPU_COUNT(&cores) != 0) usable.push_back(cores);
  }
  return usable;
}

}  // namespace neo::ipc
