#include <stdlib.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "check.hpp"
#include "ipc/numa.hpp"

using neo::ipc::parse_cpu_list;
using neo::ipc::usable_nodes;

namespace {

void lists_of_cores_are_read_as_the_kernel_writes_them() {
  const cpu_set_t set = parse_cpu_list("0-2,5,9-10\n");
  CHECK(CPU_COUNT(&set) == 6);
  for (int core : {0, 1, 2, 5, 9, 10}) CHECK(CPU_ISSET(core, &set));
  const cpu_set_t none = parse_cpu_list("");
  CHECK(CPU_COUNT(&none) == 0);
}

void write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << "\n";
  CHECK(file.good());
}

// Node 1 has memory only; node 3 has cores that are not ours.
void nodes_without_a_core_of_ours_are_left_out() {
  char folder[] = "/tmp/neo-numa-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const std::string base = folder;
  cpu_set_t mask;
  CHECK(sched_getaffinity(0, sizeof(mask), &mask) == 0);
  int first = 0;
  while (!CPU_ISSET(first, &mask)) ++first;
  write(base + "/online", "0-1,3");
  for (int node : {0, 1, 3}) mkdir((base + "/node" + std::to_string(node)).c_str(), 0700);
  write(base + "/node0/cpulist", std::to_string(first));
  write(base + "/node1/cpulist", "");
  write(base + "/node3/cpulist", "1022-1023");
  const auto nodes = usable_nodes(base);
  CHECK(nodes.size() == 1);
  CHECK(CPU_COUNT(&nodes[0]) == 1 && CPU_ISSET(first, &nodes[0]));
  CHECK(usable_nodes(base + "/missing").empty());
}

}  // namespace

int main() {
  that("lists of cores are read as the kernel writes them",
       lists_of_cores_are_read_as_the_kernel_writes_them);
  that("nodes without a core of ours are left out", nodes_without_a_core_of_ours_are_left_out);
}
