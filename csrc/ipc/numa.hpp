// Which cores belong to which NUMA node, as far as this process may use them.
#pragma once

#include <sched.h>

#include <string>
#include <vector>

namespace neo::ipc {

// "0-3,8,10-11" as a set; what is not a core number is skipped.
cpu_set_t parse_cpu_list(const std::string& text);

// One set per node that has cores of this thread's affinity mask, by node number. Empty where the
// system does not say.
std::vector<cpu_set_t> usable_nodes(const std::string& folder = "/sys/devices/system/node");

}  // namespace neo::ipc
