// A very small test harness: sentences, checks that stay on in release builds, one exit status.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: false: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                               \
    }                                                                             \
  } while (false)

template <typename Error, typename Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

template <typename Test>
void that(const char* sentence, const Test& test) {
  std::printf("%s ... ", sentence);
  std::fflush(stdout);
  test();
  std::printf("yes\n");
}
