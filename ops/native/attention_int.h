// The insides of attention by the dot product of 16-bit integers, for tasks with many rows: queries and weights of the softmax on the left,
// keys and values on the right, with the numbers of digits and the tiles of `gemm_int.h`.
//
// Queries and keys have one scale for 64 numbers of a head; values one for 64 keys of a column; weights are fractions of the block's
// largest, 2^-13 apart. That is finer than bfloat16's own rounding and coarser than float32's.
#pragma once

#include "attention_pack.h"
#include "gemm.h"

namespace PG_ISA {

#if PG_DOT8

constexpr int WEIGHT_BITS = 13;    // 64 · 2^13 · 4095 < 2³¹
constexpr float HIDDEN = -1e30f;   // a logit of a key that a row does not see: finite, so that exponentials need no case for it

struct IntTiles {
  IntRows q, weights;
  IntPanel keys, values;  // groups of 32 keys, spans of the dimension long; groups of 32 columns, spans of the block's keys long
};

static int64_t spans_of(int64_t n) { return (n + SPAN - 1) / SPAN; }

// In one piece of memory; `block`: keys, a multiple of 64.
static IntTiles carve_int(int64_t rows, int64_t dim, int64_t v_groups, int64_t block) {
  int64_t spans = spans_of(dim), deep = block / SPAN, widths[] = {rows * spans * SPAN, rows * block, block * spans * SPAN, v_groups * GROUP * block};
  int64_t scales[] = {rows * spans, rows * deep, block * spans, v_groups * GROUP * deep}, size = 0, at[8];
  for (int i = 0; i < 8; i++) {
    at[i] = size;
    size += (i < 4 ? widths[i] * 2 : scales[i - 4] * 4) / 64 * 64 + 64;
  }
  char* base = (char*)scratch<13>(size);
  IntTiles t;
  t.q = IntRows{(int16_t*)base, (float*)(base + at[4]), spans};
  t.weights = IntRows{(int16_t*)(base + at[1]), (float*)(base + at[5]), deep};
  t.keys = IntPanel{(int16_t*)(base + at[2]), (float*)(base + at[6])};
  t.values = IntPanel{(int16_t*)(base + at[3]), (float*)(base + at[7])};
  for (int64_t i = 0; i < rows * deep; i++) t.weights.scale[i] = 1.0f / (1 << WEIGHT_BITS);
  return t;
}

template <class T>
PG_INLINE void int_row(const T* x, int64_t inner, int16_t* out, float* scale) {
  for (int64_t s = 0; s < inner; s += SPAN, out += SPAN) {
    vf v[SPAN / W];
    for (int64_t i = 0; i < SPAN / W; i++) v[i] = s + i * W < inner ? load_some(x + s + i * W, inner - s - i * W) : vf{};
    *scale++ = int_span(v, out);
  }
}

// Sixteen vectors of numbers `ld` floats apart, up to 64 of them, to integers with one scale a lane: `out` takes pairs of them.
PG_INLINE void int_lanes(const float* x, int64_t ld, int64_t count, int16_t* out, float* scale) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i++) top = _mm512_max_epi32(top, magnitude(load(x + i * ld)));
  __m512 largest = (__m512)top, inverse = reciprocal(largest, LARGEST_RIGHT);
  _mm512_storeu_ps(scale, _mm512_mul_ps(largest, _mm512_set1_ps(1.0f / LARGEST_RIGHT)));
  int64_t i = 0;
  for (; i + 1 < count; i += 2, out += 2 * GROUP)
    put_nearest(_mm512_loadu_ps(x + i * ld), _mm512_loadu_ps(x + (i + 1) * ld), inverse, out);
  if (i < count) put_nearest(_mm512_loadu_ps(x + i * ld), _mm512_setzero_ps(), inverse, out), i += 2, out += 2 * GROUP;
  for (; i < SPAN; i += 2, out += 2 * GROUP) _mm512_storeu_si512(out, _mm512_setzero_si512());
}

// Up to 32 keys → a panel of `spans`. Places without a key repeat the last one.
template <class T>
static void int_keys(const T* const* rows, int64_t count, int64_t dim, IntPanel to) {
  alignas(64) float columns[SPAN * 16];
  for (int64_t s = 0; s < dim; s += SPAN, to.w += SPAN * GROUP, to.scale += GROUP) {
    int64_t width = dim - s < SPAN ? dim - s : SPAN;
    for (int half = 0; half < GROUP; half += 16) {
      const void* sixteen[16];
      for (int i = 0; i < 16; i++) sixteen[i] = rows[half + i < count ? half + i : count - 1] + s;
      if (width % 16 == 0) {
        pack_sixteen<sizeof(T) == 2>(sixteen, width, (uint32_t*)columns, 16);
      } else {
        for (int64_t d = 0; d < width; d++)
          for (int i = 0; i < 16; i++) columns[d * 16 + i] = to_float(((const T*)sixteen[i])[d]);
      }
      int_lanes(columns, 16, width, to.w + half * 2, to.scale + half);
    }
  }
}

// Sixteen numbers of a row of values, zeros behind the last.
template <class T>
PG_INLINE vf values_of(const T* row, int64_t first, int64_t dim) {
  return first < dim ? load_some(row + first, dim - first) : vf{};
}
PG_INLINE vf values_of(const int8_t* row, int64_t first, int64_t dim) {
  int8_t codes[W] = {};
  float scale;
  if (first < dim) memcpy(codes, row + first, dim - first < W ? dim - first : W);
  memcpy(&scale, row + dim, 4);
  return __builtin_convertvector(load_as<vc>(codes), vf) * scale;
}

// Up to 64 keys' values of one group of columns → a span of a panel.
template <class T>
static void int_values(const T* const* rows, int64_t count, int64_t first, int64_t v_dim, IntPanel to) {
  alignas(64) float numbers[SPAN * 16];
  for (int half = 0; half < GROUP; half += 16) {
    for (int64_t j = 0; j < count; j++) store(numbers + j * 16, values_of(rows[j], first + half, v_dim));
    int_lanes(numbers, 16, count, to.w + half * 2, to.scale + half);
  }
}

// 2^13 · 2^x for x ≤ 0, to 17 bits, as integers.
PG_INLINE __m512i weight_of(__m512 x) {
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, whole);
  constexpr float unit = 1 << WEIGHT_BITS;
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(unit * 9.6181291e-3f), r, _mm512_set1_ps(unit * 5.5504109e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(unit * 2.4022651e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(unit * 6.9314718e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(unit));
  return _mm512_cvtps_epi32(_mm512_scalef_ps(y, whole));
}

// The largest of `count` numbers, a multiple of sixteen. NaN may be passed over.
PG_INLINE float row_peak(const float* x, int64_t count) {
  __m512 best[4];
  for (int i = 0; i < 4; i++) best[i] = _mm512_loadu_ps(x);
  int64_t j = 0;
  for (; j + 4 * W <= count; j += 4 * W)
    for (int i = 0; i < 4; i++) best[i] = _mm512_max_ps(best[i], _mm512_loadu_ps(x + j + i * W));
  for (; j < count; j += W) best[0] = _mm512_max_ps(best[0], _mm512_loadu_ps(x + j));
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(best[0], best[1]), _mm512_max_ps(best[2], best[3])));
}

// What `soften` does, with weights in 2^-13. `padded`: a multiple of 64.
static void soften_int(const PgAttention* f, float* logits, int16_t* weights, int64_t low, int64_t high, int64_t padded, float slope, float far,
                       float* top, float* total) {
  *top = -INFINITY, *total = 0;
  int64_t first = low / W * W, last = (high + W - 1) / W * W;
  if (high <= low) first = last = 0;
  for (int64_t j = 0; j < first; j += W) _mm256_storeu_si256((__m256i*)(weights + j), _mm256_setzero_si256());
  for (int64_t j = last; j < padded; j += W) _mm256_storeu_si256((__m256i*)(weights + j), _mm256_setzero_si256());
  if (first == last) return;
  float scale = f->scale;
  if (f->softcap > 0 || slope != 0 || scale <= 0) {
    alignas(64) float lane[W];
    for (int i = 0; i < W; i++) lane[i] = (float)i;
    for (int64_t j = first; j < last; j += W) {
      vf x = load(logits + j) * scale;
      if (f->softcap > 0) x = f->softcap * tanh(x / f->softcap);
      store(logits + j, x - slope * (far - ((float)j + load(lane))));
    }
    scale = 1.0f;
  }
  for (int64_t j = first; j < low; j++) logits[j] = HIDDEN;
  for (int64_t j = high; j < last; j++) logits[j] = HIDDEN;
  float peak = row_peak(logits + first, last - first);
  __m512 factor = _mm512_set1_ps(scale * 1.44269504f), offset = _mm512_set1_ps(peak * scale * -1.44269504f);
  __m512i sums = _mm512_setzero_si512(), strange = sums;  // NaN becomes the most negative integer
  for (int64_t j = first; j < last; j += W) {
    __m512i w = weight_of(_mm512_fmadd_ps(_mm512_loadu_ps(logits + j), factor, offset));
    sums = _mm512_add_epi32(sums, w);
    strange = _mm512_or_si512(strange, w);
    _mm256_storeu_si256((__m256i*)(weights + j), _mm512_cvtepi32_epi16(w));
  }
  // Integers hold no NaN: the row's statistics carry it, the first of them into all that is merged with them.
  bool odd = _mm512_movepi32_mask(strange) != 0;
  *top = odd ? NAN : peak * scale;
  *total = odd ? NAN : (float)_mm512_reduce_add_epi32(sums) * (1.0f / (1 << WEIGHT_BITS));
}

#endif

}  // namespace PG_ISA
