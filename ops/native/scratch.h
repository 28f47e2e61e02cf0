// Working memory of a thread: grows, is never given back before the thread ends, so that a step allocates nothing.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace PG_ISA {

struct Scratch {
  void* data = nullptr;
  size_t size = 0;
  ~Scratch() { free(data); }
};

template <int SLOT>
static void* scratch(size_t bytes) {
  static thread_local Scratch mine;
#if defined(__SANITIZE_ADDRESS__)
  // Exact, fresh and poisoned each time, so that a number too far, too late or never written is found.
  free(mine.data);
  if (posix_memalign(&mine.data, 64, bytes)) abort();
  memset(mine.data, 255, bytes);
  return mine.data;
#endif
  if (mine.size < bytes) {
    free(mine.data);
    mine.size = (bytes + 4095) / 4096 * 4096;
    mine.data = aligned_alloc(4096, mine.size);
    if (!mine.data) abort();
  }
  return mine.data;
}

}  // namespace PG_ISA
