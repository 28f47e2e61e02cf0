// The insides of attention for tasks with few rows, which decodes are: keys and values are multiplied where they lie, for packing them
// costs more than so few rows take.
//
// A key meets all rows at once; the products of sixteen keys are then summed across lanes together. Values are added key by key.
#pragma once

#include <type_traits>

#include "simd.h"

#if PG_W == 16
#define PG_FEW 1
#else
#define PG_FEW 0
#endif

namespace PG_ISA {

#if PG_FEW
constexpr int FEW_QUERIES = 8;

// Lane i: the sum of all lanes of v[i].
PG_INLINE vf sums_of(const vf* v) {
  __m512 a[8], b[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m512 x = (__m512)v[2 * i], y = (__m512)v[2 * i + 1];
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d x = (__m512d)a[2 * i], y = (__m512d)a[2 * i + 1];
    b[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));
  }
  auto fold = [](__m512 x, __m512 y) { return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd)); };
  return (vf)fold(fold(b[0], b[1]), fold(b[2], b[3]));
}

// logits[r][j] = q[r] · k[j] for ROWS rows of `q`, `dim` numbers each, a multiple of sixteen; whole vectors of `logits` are written.
template <int ROWS, class T>
static void few_logits(const float* q, int64_t dim, const T* const* k, int64_t count, float* logits, int64_t ld) {
  vf part[ROWS][W];
  for (int64_t j = 0; j < count; j += W) {
    for (int64_t i = 0; i < W; i++) {
      const T* row = k[j + i < count ? j + i : count - 1];
      vf sums[ROWS] = {};
      for (int64_t d = 0; d < dim; d += W) {
        vf x = load(row + d);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r] += x * load(q + r * dim + d);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) part[r][i] = sums[r];
    }
    for (int r = 0; r < ROWS; r++) store(logits + r * ld + j, sums_of(part[r]));
  }
}

// out[r][c] (+)= Σ_j weights[r][j] · v[j][c] for COLUMNS vectors of columns.
template <int ROWS, int COLUMNS, class T>
PG_INLINE void few_columns(const float* weights, int64_t ld, const T* const* v, int64_t count, int64_t first, float* out, int64_t ld_out, bool more) {
  vf sums[ROWS][COLUMNS] = {};
  if (more)
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLUMNS; c++) sums[r][c] = load(out + r * ld_out + first + c * W);
  for (int64_t j = 0; j < count; j++) {
    vf x[COLUMNS];
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) x[c] = load(v[j] + first + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      vf weight = splat(weights[r * ld + j]);
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++) sums[r][c] += weight * x[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) store(out + r * ld_out + first + c * W, sums[r][c]);
}

template <int ROWS, class T>
static void few_values(const float* weights, int64_t ld, const T* const* v, int64_t count, int64_t v_dim, float* out, int64_t ld_out, bool more) {
  constexpr int COLUMNS = ROWS <= 6 ? 4 : 2;
  int64_t c = 0;
  for (; c + COLUMNS * W <= v_dim; c += COLUMNS * W) few_columns<ROWS, COLUMNS>(weights, ld, v, count, c, out, ld_out, more);
  for (; c < v_dim; c += W) few_columns<ROWS, 1>(weights, ld, v, count, c, out, ld_out, more);
}

// do(number) with a compile-time number of rows, 1 to FEW_QUERIES.
template <class F>
PG_INLINE void with_rows(int64_t rows, F body) {
  switch (rows) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    case 7: return body(std::integral_constant<int, 7>());
    case 8: return body(std::integral_constant<int, 8>());
  }
}
#endif

}  // namespace PG_ISA
