// Products with many rows by the dot product of 16-bit integers: for prompts, where weights are bfloat16 on a processor that multiplies
// integers several times faster, or in ggml's blocks.
//
// Both sides become integers, 64 inner indices with one scale at a time: inputs of 14 bits and weights of 13 (errors of 2^-14 and 2^-13 of
// the largest of the 64, where bfloat16's own is 2^-9 of each): 64 products of them fit 32 bits, so the sums are exact. Weights are
// converted a panel at a time, which costs little beside the rows that then use it: memory holds the same packed weights that few rows
// are multiplied with, and what blocks have beside their codes (offsets, minima) is in the integers.
#pragma once

#include "pointwise.h"  // included by gemm.h, whose `emit` it needs

namespace PG_ISA {

#if PG_DOT8

constexpr int64_t MANY_ROWS = 64;          // from here on converting blocks costs little
constexpr int64_t SOME_ROWS = 13;          // and bfloat16 weights, of which a conversion takes as long as eight rows
constexpr int64_t SPAN = 64;               // inner indices with one scale
constexpr int64_t DEPTH = 320;             // most inner indices of a panel of 32 columns that stays in the first-level cache
constexpr int64_t LEFT_BYTES = 1 << 20;    // of inputs that a thread takes through all its columns: they stay in its second-level cache
constexpr int64_t AHEAD_SPAN = SPAN * 64;  // bytes of bfloat16 weights in a span of a panel
constexpr float LARGEST_LEFT = 8191.0f;    // 64 · 8191 · 4095 < 2³¹
constexpr float LARGEST_RIGHT = 4095.0f;
constexpr float NOTHING = 1e-30f;          // below are numbers that a scale cannot hold

struct IntRows {
  int16_t* x;    // [rows][spans · 64], zeros behind the last
  float* scale;  // [rows][spans]
  int64_t spans;
  IntRows from(int64_t row) const { return {x + row * spans * SPAN, scale + row * spans, spans}; }
};

// A panel of the right side: integers `[pairs][32][2]`, and 32 scales a span.
struct IntPanel {
  int16_t* w;
  float* scale;
};

PG_INLINE __m512 reciprocal(__m512 largest, float most) {
  __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(NOTHING), _CMP_GT_OQ);
  return _mm512_maskz_div_ps(some, _mm512_set1_ps(most), largest);
}

PG_INLINE __m512i magnitude(vf x) { return _mm512_and_si512((__m512i)x, _mm512_set1_epi32(0x7fffffff)); }

// Not finite: the scale is not finite either, and so every result that it meets.
PG_INLINE float int_span(const vf (&x)[SPAN / W], int16_t* out) {
  __m512i top = _mm512_setzero_si512();
  for (vf v : x) top = _mm512_max_epi32(top, magnitude(v));
  __m512 largest = (__m512)_mm512_set1_epi32(_mm512_reduce_max_epi32(top)), inverse = reciprocal(largest, LARGEST_LEFT);
  for (int i = 0; i < SPAN / W; i++)
    _mm256_storeu_si256((__m256i*)(out + i * W), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps((__m512)x[i], inverse))));
  return _mm512_cvtss_f32(largest) * (1.0f / LARGEST_LEFT);
}

template <class T>
static IntRows int_rows(const T* x, int64_t x_stride, int64_t rows, int64_t inner, int threads) {
  int64_t spans = (inner + SPAN - 1) / SPAN, numbers = rows * spans * SPAN;
  char* base = (char*)scratch<8>(numbers * 2 + rows * spans * 4);
  IntRows in{(int16_t*)base, (float*)(base + numbers * 2), spans};
  for_rows(rows, team(rows, inner * 2, threads), [=](int64_t r) {
    for (int64_t s = 0; s < spans; s++) {
      vf v[SPAN / W];
      for (int64_t i = 0; i < SPAN / W; i++) {
        int64_t at = s * SPAN + i * W;
        v[i] = at < inner ? load_some(x + r * x_stride + at, inner - at) : vf{};
      }
      in.scale[r * spans + s] = int_span(v, in.x + (r * spans + s) * SPAN);
    }
  });
  return in;
}

// Two vectors of numbers, the even and the odd inner indices of sixteen columns, to their place.
PG_INLINE void put_pair(__m512 even, __m512 odd, int16_t* out) {
  __m512i low = _mm512_cvtps_epi32(even), high = _mm512_slli_epi32(_mm512_cvtps_epi32(odd), 16);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
}

PG_INLINE void clear_pairs(int64_t first, int16_t* out) {
  for (int64_t p = first; p < SPAN / 2; p++) _mm512_storeu_si512(out + p * 2 * GROUP, _mm512_setzero_si512());
}

// x · inverse to the nearest integer in the low half of each lane: adding this number leaves no place for a fraction.
PG_INLINE __m512 nearest(__m512 x, __m512 inverse) { return _mm512_fmadd_ps(x, inverse, _mm512_set1_ps(12582912.0f)); }

PG_INLINE void put_nearest(__m512 even, __m512 odd, __m512 inverse, int16_t* out) {
  __m512i low = (__m512i)nearest(even, inverse), high = _mm512_slli_epi32((__m512i)nearest(odd, inverse), 16);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
}

// 32 columns of up to 32 pairs of inner indices, `[pair][32][2]`, to integers in the same places; half as much is fetched from `ahead` on.
PG_INLINE void int_columns(const bf16* w, int64_t pairs, int16_t* out, float* scale, const char* ahead) {
  __m512i top[2] = {}, sign = _mm512_set1_epi16(0x7fff), high = _mm512_set1_epi32((int)0xffff0000);
  for (int64_t p = 0; p < pairs; p++)
    for (int half = 0; half < 2; half++)
      top[half] = _mm512_max_epu16(top[half], _mm512_and_si512(_mm512_loadu_si512(w + p * 2 * GROUP + half * GROUP), sign));
  __m512 inverse[2];
  for (int half = 0; half < 2; half++) {
    __m512 largest = (__m512)_mm512_max_epi32(_mm512_slli_epi32(top[half], 16), _mm512_and_si512(top[half], high));
    inverse[half] = reciprocal(largest, LARGEST_RIGHT);
    _mm512_storeu_ps(scale + half * W, _mm512_mul_ps(largest, _mm512_set1_ps(1.0f / LARGEST_RIGHT)));
  }
  for (int64_t p = 0; p < pairs; p++) {
    __builtin_prefetch(ahead + p * 64, 0, 2);
    for (int half = 0; half < 2; half++) {
      __m512i v = _mm512_loadu_si512(w + p * 2 * GROUP + half * GROUP);
      put_nearest((__m512)_mm512_slli_epi32(v, 16), (__m512)_mm512_and_si512(v, high), inverse[half], out + p * 2 * GROUP + half * GROUP);
    }
  }
  for (int half = 0; half < 2; half++) clear_pairs(pairs, out + half * GROUP);
}

// Panels of bfloat16 weights.
struct DensePanels {
  static constexpr bool AHEAD = true;
  const PgGemm* g;
  const bf16* at(int64_t group, int64_t k) const { return (const bf16*)g->weight + (group * g->inner + k) * GROUP; }
  // What the panel behind this one is made of; nothing is read there.
  const char* behind(int64_t group, int64_t k, int64_t depth) const { return (const char*)at(group, k + depth); }
  void operator()(int64_t group, int64_t k, int64_t depth, IntPanel to) const {
    const bf16* w = at(group, k);
    const char* ahead = behind(group, k, depth);
    for (int64_t s = 0; s < depth; s += SPAN, w += SPAN * GROUP, to.w += SPAN * GROUP, to.scale += GROUP, ahead += AHEAD_SPAN)
      if (depth - s >= SPAN)
        int_columns(w, SPAN / 2, to.w, to.scale, ahead);
      else
        int_columns(w, (depth - s) / 2, to.w, to.scale, ahead);
  }
};

// c[R][32] (+)= x · panel. LINES: how many of a span's lines, from `ahead` on, are fetched to the second-level cache.
template <int R, int LINES = 0>
static void int_tile(const int16_t* x, int64_t ldx, const float* xs, IntPanel panel, int64_t spans, float* c, int64_t ldc, bool add,
                     const char* ahead = nullptr) {
  constexpr int EVERY = LINES ? SPAN / 2 / LINES : 1;
  const int16_t* w = panel.w;
  const float* ws = panel.scale;
  __m512 acc[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int n = 0; n < 2; n++) acc[r][n] = add ? _mm512_loadu_ps(c + r * ldc + n * W) : _mm512_setzero_ps();
  const int16_t* row[R];
  for (int r = 0; r < R; r++) row[r] = x + r * ldx;
  for (int64_t s = 0; s < spans; s++, xs++, w += SPAN * GROUP, ws += GROUP) {
    __m512i dot[R][2];
    keep_addresses(row);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) dot[r][0] = dot[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 32
    for (int p = 0; p < SPAN / 2; p++) {
      __m512i w0 = _mm512_loadu_si512(w + p * 2 * GROUP), w1 = _mm512_loadu_si512(w + p * 2 * GROUP + 2 * W);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, row[r] + 2 * p, 4);
        __m512i both = _mm512_set1_epi32(pair);
        dot[r][0] = _mm512_dpwssd_epi32(dot[r][0], w0, both);
        dot[r][1] = _mm512_dpwssd_epi32(dot[r][1], w1, both);
      }
      if (LINES && p % EVERY == 0) __builtin_prefetch(ahead + p / EVERY * 64, 0, 2);
    }
    if (LINES) ahead += AHEAD_SPAN;
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) row[r] += SPAN;
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
    for (int n = 0; n < 2; n++) _mm512_storeu_ps(c + r * ldc + n * W, acc[r][n]);
}

template <int LINES>
PG_INLINE void int_tile_rows(int64_t rows, const int16_t* x, int64_t ldx, const float* xs, IntPanel panel, int64_t spans, float* c, int64_t ldc,
                             bool add, const char* ahead) {
  switch (rows) {
    case 1: return int_tile<1, LINES>(x, ldx, xs, panel, spans, c, ldc, add, ahead);
    case 2: return int_tile<2, LINES>(x, ldx, xs, panel, spans, c, ldc, add, ahead);
    case 3: return int_tile<3, LINES>(x, ldx, xs, panel, spans, c, ldc, add, ahead);
    case 4: return int_tile<4, LINES>(x, ldx, xs, panel, spans, c, ldc, add, ahead);
    case 5: return int_tile<5, LINES>(x, ldx, xs, panel, spans, c, ldc, add, ahead);
    default: return int_tile<6, LINES>(x, ldx, xs, panel, spans, c, ldc, add, ahead);
  }
}

// All rows, from inner span `span` on, with one panel; `done(row, rows)` after each tile. Of what lies at `ahead`, if that is somewhere,
// the second half of each span is fetched: memory shall not rest while panels are multiplied.
template <class F>
static void int_multiply(const IntRows& in, int64_t rows, int64_t span, IntPanel panel, int64_t spans, float* c, int64_t ldc, bool add,
                         F done, const char* ahead = nullptr) {
  constexpr int SHARES = 4, LINES = SPAN / 2 / SHARES;
  int64_t pieces = (rows + 5) / 6, ldx = in.spans * SPAN, fetched = 0;
  for (int64_t piece = 0; piece < pieces; piece++) {
    int64_t m = rows * piece / pieces, count = rows * (piece + 1) / pieces - m;
    const int16_t* x = in.x + m * ldx + span * SPAN;
    const float* xs = in.scale + m * in.spans + span;
    int64_t due = ahead ? SHARES * (piece + 1) / pieces - fetched : 0;
    const char* from = due ? ahead + AHEAD_SPAN / 2 + fetched * LINES * 64 : nullptr;
    if (due >= 2)
      int_tile_rows<2 * LINES>(count, x, ldx, xs, panel, spans, c + m * ldc, ldc, add, from);
    else if (due)
      int_tile_rows<LINES>(count, x, ldx, xs, panel, spans, c + m * ldc, ldc, add, from);
    else
      int_tile_rows<0>(count, x, ldx, xs, panel, spans, c + m * ldc, ldc, add, nullptr);
    fetched += due;
    done(m, count);
  }
}

struct IntShape {
  int64_t inner, outer;
  const float* bias;
};

// Groups [first, last) of columns for all rows. `step`: inner indices of a panel.
template <class T, class Panels>
static void int_part(const IntShape& s, const Panels& panels, int64_t step, const IntRows& in, int64_t rows, T* out, int64_t out_stride,
                     int64_t first, int64_t last) {
  int64_t most = LEFT_BYTES / (2 * in.spans * SPAN) / 6 * 6;
  if (most < 96) most = 96;
  if (most > rows) most = rows;
  char* memory = (char*)scratch<9>(step * GROUP * 2 + step / SPAN * GROUP * 4 + most * GROUP * 4);
  IntPanel panel{(int16_t*)memory, (float*)(memory + step * GROUP * 2)};
  float* sums = panel.scale + step / SPAN * GROUP;
  int64_t blocks = (rows + most - 1) / most;
  for (int64_t block = 0; block < blocks; block++) {
    int64_t m = rows * block / blocks, count = rows * (block + 1) / blocks - m;
    IntRows mine = in.from(m);
    for (int64_t n = first; n < last; n++) {
      for (int64_t k = 0; k < s.inner; k += step) {
        int64_t depth = s.inner - k < step ? s.inner - k : step;
        panels(n, k, depth, panel);
        const char* ahead = nullptr;
        if constexpr (Panels::AHEAD) ahead = panels.behind(n, k, depth);
        bool final = k + step >= s.inner;
        // Results are written tile by tile: their way to memory passes beside the next tile.
        int_multiply(mine, count, k / SPAN, panel, (depth + SPAN - 1) / SPAN, sums, GROUP, k > 0, [&](int64_t r, int64_t some) {
          if (final) emit(s.bias, s.outer, some, n * GROUP, GROUP, sums + r * GROUP, GROUP, out + (m + r) * out_stride, out_stride);
        }, ahead);
      }
    }
  }
}

// Equal parts of the inner dimension, none longer than `DEPTH`, in spans.
static int64_t int_step(int64_t inner) {
  int64_t parts = (inner + DEPTH - 1) / DEPTH;
  return ((inner + parts - 1) / parts + SPAN - 1) / SPAN * SPAN;
}

template <class T, class Panels>
static void int_product(const IntShape& s, const Panels& panels, int64_t step, const T* x, int64_t x_stride, int64_t rows, T* out,
                        int64_t out_stride, int threads) {
  IntRows in = int_rows(x, x_stride, rows, s.inner, threads);
  int64_t groups = (s.outer + GROUP - 1) / GROUP, across = groups < threads ? groups : threads, down = threads / across;
  if (groups * s.inner * rows < 20000) return int_part(s, panels, step, in, rows, out, out_stride, 0, groups);
  if (down == 1 && groups >= 2 * across) across *= 2;
  parallel(across * down, threads, [&](int64_t id) {
    int64_t column = in_turns(id % across, across, threads), row = id / across;
    int64_t m = rows * row / down, end = rows * (row + 1) / down;
    int_part(s, panels, step, in.from(m), end - m, out + m * out_stride, out_stride, groups * column / across, groups * (column + 1) / across);
  });
}

#endif

}  // namespace PG_ISA
