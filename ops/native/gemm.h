// Dense products x · weightᵀ with weights packed in groups of 32 columns. At few rows the weights' way from memory is all that counts.
#pragma once

#include "api.h"
#include "microkernel.h"
#include "pointwise.h"
#include "pool.h"
#include "scratch.h"

namespace PG_ISA {

constexpr int64_t INNER_BLOCK = 1024;  // inner indices of a panel that stays in the second-level cache
constexpr int64_t ROW_BLOCK = 240;     // rows whose partial sums stay there too
constexpr int64_t FEW_INNER = 128;     // the same of the first-level cache, where rows are few
constexpr int FEW_ROWS = 32;           // up to here weights are fetched ahead

template <class T>
static void pack_groups(const PgGemm* g, const T* source, int64_t stride, T* packed) {
  constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;
  int64_t groups = (g->outer + GROUP - 1) / GROUP;
#pragma omp parallel for schedule(static)
  for (int64_t group = 0; group < groups; group++) {
    T* out = packed + group * g->inner * GROUP;
    for (int64_t i = 0; i < g->inner; i += PAIR)
      for (int64_t column = 0; column < GROUP; column++)
        for (int p = 0; p < PAIR; p++) {
          int64_t row = group * GROUP + column;
          *out++ = row < g->outer ? source[row * stride + i + p] : T(0);
        }
  }
}

static void pack(const PgGemm* g, const void* source, int64_t stride, void* packed) {
  if (g->type == PG_BF16)
    pack_groups(g, (const bf16*)source, stride, (bf16*)packed);
  else
    pack_groups(g, (const float*)source, stride, (float*)packed);
}

// Sums, bias added, as the output wants them; columns past the last are dropped.
template <class T>
PG_INLINE void emit(const float* bias, int64_t outer, int64_t rows, int64_t first_column, int64_t columns, const float* sums, int64_t ldc, T* out,
                    int64_t out_stride) {
  if (first_column + columns > outer) columns = outer - first_column;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c += W) {
      vf v = load(sums + r * ldc + c);
      if (bias) v += load(bias + first_column + c);
      T* target = out + r * out_stride + first_column + c;
      if (c + W <= columns)
        store(target, v);
      else
        store_part(target, v, (int)(columns - c));
    }
}

template <class K, class Out>
static void gemm_part(const PgGemm* g, const typename K::A* x, int64_t x_stride, int64_t rows, Out* out, int64_t out_stride, int64_t first,
                      int64_t last) {
  typedef typename K::B B;
  const B* weight = (const B*)g->weight;
  int64_t inner = g->inner, group = inner * GROUP;
  bool few = rows <= FEW_ROWS;
  alignas(64) float small[FEW_ROWS * MAX_GROUPS * GROUP];
  float* sums = few ? small : (float*)scratch<0>(ROW_BLOCK * MAX_GROUPS * GROUP * sizeof(float));
  constexpr int64_t ldc = MAX_GROUPS * GROUP;
  for (int64_t n = first; n < last; n += MAX_GROUPS) {
    int64_t groups = last - n < MAX_GROUPS ? last - n : MAX_GROUPS;
    for (int64_t m = 0; m < rows; m += ROW_BLOCK) {
      int64_t count = rows - m < ROW_BLOCK ? rows - m : ROW_BLOCK;
      int64_t step = !few ? INNER_BLOCK : rows <= MAX_ROWS ? inner : FEW_INNER;
      for (int64_t k = 0; k < inner; k += step) {
        int64_t depth = inner - k < step ? inner - k : step;
        const typename K::A* left = x + m * x_stride + k;
        const B* right = weight + n * group + k * GROUP;
        int64_t next = k + step < inner ? step * GROUP : MAX_GROUPS * group - k * GROUP;
        if (few)
          multiply_few<K>(count, groups, left, x_stride, right, group, depth, sums, ldc, k > 0, next * (int64_t)sizeof(B));
        else
          multiply<K>(count, groups, left, x_stride, right, group, depth, sums, ldc, k > 0);
      }
      emit(g->bias, g->outer, count, n * GROUP, groups * GROUP, sums, ldc, out + m * out_stride, out_stride);
    }
  }
}

template <class K, class Out>
static void gemm_threads(const PgGemm* g, const typename K::A* x, int64_t x_stride, int64_t rows, Out* out, int64_t out_stride, int threads) {
  int64_t groups = (g->outer + GROUP - 1) / GROUP;
  // A thread takes a span of columns; where there are more threads than groups, rows are split as well.
  int64_t across = groups < threads ? groups : threads, down = threads / across;
  if (down > rows) down = rows;
  if (across * down <= 1 || groups * g->inner * rows < 20000) return gemm_part<K>(g, x, x_stride, rows, out, out_stride, 0, groups);
  int64_t pairs = (groups + MAX_GROUPS - 1) / MAX_GROUPS;
  if (down == 1 && pairs >= 2 * across) across *= 2;
  parallel(across * down, threads, [&](int64_t id) {
    int64_t column = in_turns(id % across, across, threads), row = id / across;
    int64_t m = rows * row / down, end = rows * (row + 1) / down;
    int64_t first = pairs * column / across * MAX_GROUPS, last = pairs * (column + 1) / across * MAX_GROUPS;
    if (pairs < across) first = groups * column / across, last = groups * (column + 1) / across;
    if (last > groups) last = groups;
    gemm_part<K>(g, x + m * x_stride, x_stride, end - m, out + m * out_stride, out_stride, first, last);
  });
}

}  // namespace PG_ISA

#include "gemm_int.h"

namespace PG_ISA {

static void gemm(const PgGemm* g, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads) {
  if (rows == 0 || g->outer == 0) return;
  if (g->type == PG_F32) return gemm_threads<F32>(g, (const float*)x, x_stride, rows, (float*)out, out_stride, threads);
#if PG_DOT8 && !PG_DOT16
  if (g->any_order && rows >= SOME_ROWS)
    return int_product(IntShape{g->inner, g->outer, g->bias}, DensePanels{g}, int_step(g->inner), (const bf16*)x, x_stride, rows, (bf16*)out,
                       out_stride, threads);
#endif
#if PG_DOT16
  gemm_threads<Dot16>(g, (const bf16*)x, x_stride, rows, (bf16*)out, out_stride, threads);
#else
  float* wide = (float*)scratch<1>(rows * g->inner * sizeof(float));
  const bf16* narrow = (const bf16*)x;
  for_rows(rows, team(rows, g->inner, threads), [=](int64_t r) {
    for (int64_t i = 0; i < g->inner; i += W) store_some(wide + r * g->inner + i, load_some(narrow + r * x_stride + i, g->inner - i), g->inner - i);
  });
  gemm_threads<Wide16>(g, wide, g->inner, rows, (bf16*)out, out_stride, threads);
#endif
}

}  // namespace PG_ISA
