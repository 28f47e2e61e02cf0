// Rows of packed weights by number: a table of embeddings that a head multiplies by needs no second copy. Rows that are not there are zero.
#pragma once

#include "api.h"
#include "pointwise.h"
#include "quant.h"

namespace PG_ISA {

// STEP: inner indices that lie together.
template <class T, int STEP>
static void gather_of(const PgGemm* g, const int64_t* ids, int64_t count, T* out, int64_t out_stride, int threads) {
  for_rows(count, team(count, 4 * g->inner, threads), [=](int64_t r) {
    T* to = out + r * out_stride;
    if (ids[r] < 0 || ids[r] >= g->outer) {
      memset(to, 0, g->inner * sizeof(T));
      return;
    }
    const T* column = (const T*)g->weight + ids[r] / GROUP * GROUP * g->inner + ids[r] % GROUP * STEP;
    for (int64_t i = 0; i < g->inner; i += STEP) memcpy(to + i, column + i * GROUP, STEP * sizeof(T));
  });
}

static void gather(const PgGemm* g, const int64_t* ids, int64_t count, void* out, int64_t out_stride, int threads) {
  if (g->type == PG_BF16)
    gather_of<bf16, 2>(g, ids, count, (bf16*)out, out_stride, threads);
  else
    gather_of<float, 1>(g, ids, count, (float*)out, out_stride, threads);
}

// One block of 32 numbers of the column `c` of a group.
template <class T>
PG_INLINE void gather_block(const Format& f, const uint8_t* block, int64_t c, T* to) {
  const uint8_t *half = block + c / 16 * f.half_bytes() + c % 16 * 4, *tail = block + 2 * f.half_bytes() + 2 * c;
  uint16_t bits[2] = {0, 0};
  memcpy(bits, tail, 2);
  if (f.minimum) memcpy(bits + 1, tail + 64, 2);
  float scale = half_to_float(bits[0]), minimum = f.minimum ? half_to_float(bits[1]) : 0.0f;
  for (int i = 0; i < BLOCK; i++) {
    int quad = i / 4;
    int code = f.bits == 8 ? half[quad * 64 + i % 4] : half[quad / 2 * 64 + i % 4] >> quad % 2 * 4 & 15;
    put(to + i, scale * (float)(code - f.offset) + minimum);
  }
}

template <class T>
static void quant_gather_of(const PgQuant* q, const int64_t* ids, int64_t count, T* out, int64_t out_stride, int threads) {
  const Format& f = FORMATS[q->kind];
  int64_t blocks = q->inner / BLOCK, size = f.block_bytes();
  for_rows(count, team(count, 4 * q->inner, threads), [=](int64_t r) {
    T* to = out + r * out_stride;
    if (ids[r] < 0 || ids[r] >= q->outer) {
      memset(to, 0, q->inner * sizeof(T));
      return;
    }
    const uint8_t* group = (const uint8_t*)q->weight + ids[r] / GROUP * blocks * size;
    for (int64_t b = 0; b < blocks; b++) gather_block(f, group + b * size, ids[r] % GROUP, to + b * BLOCK);
  });
}

// Formats in blocks of 32 alone.
static void quant_gather(const PgQuant* q, const int64_t* ids, int64_t count, void* out, int64_t out_stride, int threads) {
  if (q->type == PG_BF16)
    quant_gather_of(q, ids, count, (bf16*)out, out_stride, threads);
  else
    quant_gather_of(q, ids, count, (float*)out, out_stride, threads);
}

}  // namespace PG_ISA
