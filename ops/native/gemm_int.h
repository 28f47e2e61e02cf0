// Dense bfloat16 products with many rows, by the dot product of 16-bit integers: for processors that multiply those several times
// faster than bfloat16 pairs or float32.
//
// Both sides become integers of 14 bits, 32 inner indices with one scale at a time (an error of 2^-14 of the largest of the 32, where
// bfloat16's own is 2^-9 of each): 32 products of them fit 32 bits, so the sums are exact. Weights are converted a panel at a time,
// which costs nothing beside the rows that then use it: memory holds the same packed weights that few rows are multiplied with.
#pragma once

#include "pointwise.h"  // included by gemm.h, whose `emit` it needs

namespace PG_ISA {

#if PG_DOT8 && !PG_DOT16

constexpr int64_t MANY_ROWS = 64;   // from here on converting weights costs little
constexpr int64_t SPAN = 32;        // inner indices with one scale
constexpr int64_t DEPTH = 512;      // inner indices of a panel of 32 columns that stays in the first-level cache
constexpr int64_t SUM_ROWS = 1024;  // rows whose partial sums stay in the second-level cache
constexpr float LARGEST = 8191.0f;  // 32 · 8191² < 2³¹
constexpr float NOTHING = 1e-30f;   // below are numbers that a scale cannot hold

struct IntRows {
  int16_t* x;    // [rows][spans · 32], zeros behind the last
  float* scale;  // [rows][spans]
  int64_t spans;
};

PG_INLINE __m512 reciprocal(__m512 largest) {
  __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(NOTHING), _CMP_GT_OQ);
  return _mm512_maskz_div_ps(some, _mm512_set1_ps(LARGEST), largest);
}

// Not finite: the scale is not finite either, and so every result that it meets.
PG_INLINE float int_span(vf a, vf b, int16_t* out) {
  __m512i sign = _mm512_set1_epi32(0x7fffffff);
  __m512i top = _mm512_max_epi32(_mm512_and_si512((__m512i)a, sign), _mm512_and_si512((__m512i)b, sign));
  __m512 largest = (__m512)_mm512_set1_epi32(_mm512_reduce_max_epi32(top)), inverse = reciprocal(largest);
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps((__m512)a, inverse))));
  _mm256_storeu_si256((__m256i*)(out + W), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps((__m512)b, inverse))));
  return _mm512_cvtss_f32(largest) * (1.0f / LARGEST);
}

static IntRows int_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inner, int threads) {
  int64_t spans = (inner + SPAN - 1) / SPAN, numbers = rows * spans * SPAN;
  char* base = (char*)scratch<8>(numbers * 2 + rows * spans * 4);
  IntRows in{(int16_t*)base, (float*)(base + numbers * 2), spans};
  for_rows(rows, team(rows, inner * 2, threads), [=](int64_t r) {
    for (int64_t s = 0; s < spans; s++) {
      const bf16* from = x + r * x_stride + s * SPAN;
      int64_t left = inner - s * SPAN;
      vf a = load_some(from, left), b = left > W ? load_some(from + W, left - W) : vf{};
      in.scale[r * spans + s] = int_span(a, b, in.x + (r * spans + s) * SPAN);
    }
  });
  return in;
}

// Sixteen columns of up to 16 pairs of inner indices, `[pair][32][2]`, to integers in the same places.
static void int_columns(const bf16* w, int64_t pairs, int16_t* out, float* scale) {
  __m512i top = _mm512_setzero_si512(), sign = _mm512_set1_epi16(0x7fff), high = _mm512_set1_epi32((int)0xffff0000);
  for (int64_t p = 0; p < pairs; p++) top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_loadu_si512(w + p * 2 * GROUP), sign));
  __m512 largest = (__m512)_mm512_max_epi32(_mm512_slli_epi32(top, 16), _mm512_and_si512(top, high)), inverse = reciprocal(largest);
  _mm512_storeu_ps(scale, _mm512_mul_ps(largest, _mm512_set1_ps(1.0f / LARGEST)));
  for (int64_t p = 0; p < pairs; p++) {
    __m512i v = _mm512_loadu_si512(w + p * 2 * GROUP);
    __m512i even = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)_mm512_slli_epi32(v, 16), inverse));
    __m512i odd = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)_mm512_and_si512(v, high), inverse));
    _mm512_storeu_si512(out + p * 2 * GROUP, _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16)));
  }
  for (int64_t p = pairs; p < SPAN / 2; p++) _mm512_storeu_si512(out + p * 2 * GROUP, _mm512_setzero_si512());
}

static void int_panel(const bf16* w, int64_t depth, int16_t* out, float* scale) {
  for (int64_t k = 0; k < depth; k += SPAN, w += SPAN * GROUP, out += SPAN * GROUP, scale += GROUP)
    for (int half = 0; half < GROUP; half += W)
      int_columns(w + half * 2, (depth - k < SPAN ? depth - k : SPAN) / 2, out + half * 2, scale + half);
}

// c[R][32] (+)= x · panel.
template <int R>
static void int_tile(const int16_t* x, int64_t ldx, const float* xs, const int16_t* w, const float* ws, int64_t spans, float* c, bool add) {
  __m512 acc[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int n = 0; n < 2; n++) acc[r][n] = add ? _mm512_loadu_ps(c + r * GROUP + n * W) : _mm512_setzero_ps();
  for (int64_t s = 0; s < spans; s++, x += SPAN, xs++, w += SPAN * GROUP, ws += GROUP) {
    __m512i dot[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) dot[r][0] = dot[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int p = 0; p < SPAN / 2; p++) {
      __m512i w0 = _mm512_loadu_si512(w + p * 2 * GROUP), w1 = _mm512_loadu_si512(w + p * 2 * GROUP + 2 * W);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, x + r * ldx + 2 * p, 4);
        __m512i both = _mm512_set1_epi32(pair);
        dot[r][0] = _mm512_dpwssd_epi32(dot[r][0], w0, both);
        dot[r][1] = _mm512_dpwssd_epi32(dot[r][1], w1, both);
      }
    }
    __m512 s0 = _mm512_loadu_ps(ws), s1 = _mm512_loadu_ps(ws + W);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      __m512 mine = _mm512_set1_ps(xs[r * (ldx / SPAN)]);
      acc[r][0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][0]), s0), mine, acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][1]), s1), mine, acc[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int n = 0; n < 2; n++) _mm512_storeu_ps(c + r * GROUP + n * W, acc[r][n]);
}

// All rows with one panel.
static void int_multiply(const IntRows& in, int64_t first, int64_t rows, int64_t span, const int16_t* w, const float* ws, int64_t spans,
                         float* c, bool add) {
  int64_t pieces = (rows + 5) / 6, ldx = in.spans * SPAN;
  for (int64_t piece = 0; piece < pieces; piece++) {
    int64_t m = rows * piece / pieces, count = rows * (piece + 1) / pieces - m;
    const int16_t* x = in.x + (first + m) * ldx + span * SPAN;
    const float* xs = in.scale + (first + m) * in.spans + span;
    float* target = c + m * GROUP;
    switch (count) {
      case 1: int_tile<1>(x, ldx, xs, w, ws, spans, target, add); break;
      case 2: int_tile<2>(x, ldx, xs, w, ws, spans, target, add); break;
      case 3: int_tile<3>(x, ldx, xs, w, ws, spans, target, add); break;
      case 4: int_tile<4>(x, ldx, xs, w, ws, spans, target, add); break;
      case 5: int_tile<5>(x, ldx, xs, w, ws, spans, target, add); break;
      default: int_tile<6>(x, ldx, xs, w, ws, spans, target, add);
    }
  }
}

static void int_part(const PgGemm* g, const IntRows& in, int64_t rows, bf16* out, int64_t out_stride, int64_t first, int64_t last) {
  char* memory = (char*)scratch<9>(DEPTH * GROUP * 2 + DEPTH / SPAN * GROUP * 4 + SUM_ROWS * GROUP * 4);
  int16_t* panel = (int16_t*)memory;
  float* scale = (float*)(memory + DEPTH * GROUP * 2);
  float* sums = scale + DEPTH / SPAN * GROUP;
  for (int64_t m = 0; m < rows; m += SUM_ROWS) {
    int64_t count = rows - m < SUM_ROWS ? rows - m : SUM_ROWS;
    for (int64_t n = first; n < last; n++) {
      const bf16* weight = (const bf16*)g->weight + n * g->inner * GROUP;
      for (int64_t k = 0; k < g->inner; k += DEPTH) {
        int64_t depth = g->inner - k < DEPTH ? g->inner - k : DEPTH;
        int_panel(weight + k * GROUP, depth, panel, scale);
        int_multiply(in, m, count, k / SPAN, panel, scale, (depth + SPAN - 1) / SPAN, sums, k > 0);
      }
      emit(g->bias, g->outer, count, n * GROUP, GROUP, sums, GROUP, out + m * out_stride, out_stride);
    }
  }
}

static void int_gemm(const PgGemm* g, const bf16* x, int64_t x_stride, int64_t rows, bf16* out, int64_t out_stride, int threads) {
  IntRows in = int_rows(x, x_stride, rows, g->inner, threads);
  int64_t groups = (g->outer + GROUP - 1) / GROUP, across = groups < threads ? groups : threads, down = threads / across;
  if (groups * g->inner * rows < 20000) return int_part(g, in, rows, out, out_stride, 0, groups);
  parallel(across * down, threads, [&](int64_t id) {
    int64_t column = id % across, row = id / across;
    int64_t m = rows * row / down, end = rows * (row + 1) / down;
    IntRows mine{in.x + m * in.spans * SPAN, in.scale + m * in.spans, in.spans};
    int_part(g, mine, end - m, out + m * out_stride, out_stride, groups * column / across, groups * (column + 1) / across);
  });
}

#endif

}  // namespace PG_ISA
