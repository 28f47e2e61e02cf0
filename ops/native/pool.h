// Threads for the kernels. Work is cut into parts that threads take one after the other: a thread that the machine gives no time holds up
// nothing but the part that it has begun, and the caller does alone what nobody else comes for.
#pragma once

#include <cstdint>

// Calls body(context, part) for each part in [0, parts), on up to `threads` threads with the caller among them; returns when all are done.
// Inside a part, and while another thread's call runs, the caller does everything itself.
void pg_parallel(int64_t parts, int threads, void (*body)(void* context, int64_t part), void* context);

namespace PG_ISA {

template <class F>
static inline void parallel(int64_t parts, int threads, F body) {
  if (parts <= 1 || threads <= 1) {
    for (int64_t i = 0; i < parts; i++) body(i);
    return;
  }
  pg_parallel(parts, threads, [](void* context, int64_t part) { (*(F*)context)(part); }, &body);
}

// Which part to do i-th, so that threads that take parts in turns each go on where they were.
static inline int64_t in_turns(int64_t i, int64_t parts, int threads) {
  return parts % threads ? i : i % threads * (parts / threads) + i / threads;
}

// Splits [0, total) in spans that begin at multiples of `grain`; a few a thread where there are enough, so that a slow one is made up for.
template <class F>
static inline void parallel_spans(int64_t total, int threads, F body, int64_t grain = 1) {
  int64_t pieces = (total + grain - 1) / grain;
  int64_t parts = threads <= 1 ? 1 : pieces >= 2 * threads ? 2 * threads : pieces < threads ? pieces : threads;
  parallel(parts, threads, [&](int64_t i) {
    int64_t part = in_turns(i, parts, threads);
    int64_t last = pieces * (part + 1) / parts * grain;
    body(pieces * part / parts * grain, last < total ? last : total);
  });
}

}  // namespace PG_ISA
