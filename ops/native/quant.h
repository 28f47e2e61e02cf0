// Products with weights in blocks of 32 with a scale (and a minimum) each, as ggml stores them: they stay 4 or 8 bits wide in memory.
//
// Codes are small integers, exact in bfloat16, so a block's products with a bfloat16 input are exact and summed in float32; scale and
// minimum come after: out = Σ scale · (x · codes) + minimum · Σx. Nothing of the input is rounded. Needs the bfloat16 dot product.
#pragma once

#include <omp.h>

#include "api.h"
#include "gemm.h"
#include "microkernel.h"
#include "scratch.h"

namespace PG_ISA {

constexpr int64_t BLOCK = 32;

// Bytes of one block of 32 inner indices for a group of 32 columns: codes of columns 0–15, of 16–31, scales, minima (float16).
// 4 bits: sixteen-bit words [4][16 columns][2], nibble i of word j is pair 4j + i. 8 bits: signed bytes [16 pairs][16 columns][2].
struct Format {
  int bits;
  bool minimum;
  int8_t values[16];  // of a 4-bit code
  int64_t block_bytes() const { return 2 * half_bytes() + 64 + (minimum ? 64 : 0); }
  int64_t half_bytes() const { return bits == 4 ? 256 : 512; }
};

static const Format FORMATS[] = {
    {4, false, {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}},                       // Q4_0
    {4, true, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}},                          // Q4_1
    {8, false, {}},                                                                             // Q5_0
    {8, true, {}},                                                                              // Q5_1
    {8, false, {}},                                                                             // Q8_0
    {4, false, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}},     // IQ4_NL
};
enum Kind { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL };
static const int64_t GGML_BYTES[] = {18, 20, 22, 24, 34, 18};

// One ggml block: 32 codes (4-bit ones unsigned, others signed), scale and minimum as float16 bits.
static void read_block(int kind, const uint8_t* p, int8_t* codes, uint16_t* scale, uint16_t* minimum) {
  memcpy(scale, p, 2);
  p += 2;
  *minimum = 0;
  if (FORMATS[kind].minimum) memcpy(minimum, p, 2), p += 2;
  if (kind == Q8_0) {
    memcpy(codes, p, 32);
    return;
  }
  uint32_t high = 0;
  if (kind == Q5_0 || kind == Q5_1) memcpy(&high, p, 4), p += 4;
  int offset = kind == Q5_0 ? 16 : 0;
  for (int i = 0; i < 16; i++) {
    codes[i] = (int8_t)(((p[i] & 15) | (high >> i & 1) << 4) - offset);
    codes[i + 16] = (int8_t)((p[i] >> 4 | (high >> (i + 16) & 1) << 4) - offset);
  }
}

static void put_code(int bits, uint8_t* half, int inner, int column, int8_t code) {
  int pair = inner / 2, lane = column * 2 + inner % 2;
  if (bits == 8) {
    half[pair * 32 + lane] = (uint8_t)code;
    return;
  }
  int shift = 4 * (pair % 4);
  uint8_t* byte = half + (pair / 4 * 32 + lane) * 2 + shift / 8;
  *byte = (uint8_t)(*byte | (code & 15) << shift % 8);
}

static void quant_pack(const PgQuant* q, const void* source, int64_t row_bytes, void* packed) {
  const Format& f = FORMATS[q->kind];
  int64_t groups = (q->outer + GROUP - 1) / GROUP, blocks = q->inner / BLOCK, size = f.block_bytes();
#pragma omp parallel for schedule(static)
  for (int64_t g = 0; g < groups; g++)
    for (int64_t b = 0; b < blocks; b++) {
      uint8_t* out = (uint8_t*)packed + (g * blocks + b) * size;
      memset(out, 0, size);
      for (int column = 0; column < GROUP && g * GROUP + column < q->outer; column++) {
        int8_t codes[32];
        uint16_t scale, minimum;
        read_block(q->kind, (const uint8_t*)source + (g * GROUP + column) * row_bytes + b * GGML_BYTES[q->kind], codes, &scale, &minimum);
        for (int i = 0; i < 32; i++) put_code(f.bits, out + column / 16 * f.half_bytes(), i, column % 16, codes[i]);
        uint8_t* tail = out + 2 * f.half_bytes();
        memcpy(tail + column * 2, &scale, 2);
        if (f.minimum) memcpy(tail + 64 + column * 2, &minimum, 2);
      }
    }
}

static int64_t quant_bytes(const PgQuant* q) {
  return (q->outer + GROUP - 1) / GROUP * (q->inner / BLOCK) * FORMATS[q->kind].block_bytes();
}

#if PG_DOT16

PG_INLINE __m512 half_floats(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

PG_INLINE __m512bh pair_of(const bf16* x) {
  int32_t pair;
  memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Signed bytes to bfloat16, exactly: both halves of each word through float32.
PG_INLINE __m512bh widen_bytes(const uint8_t* p) {
  __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
  __m512i even = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
  __m512i odd = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
  return (__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

PG_INLINE __m512i code_table(const Format& f) {
  uint16_t table[32];
  for (int i = 0; i < 32; i++) put(table + i, (float)f.values[i % 16]);
  return _mm512_loadu_si512(table);
}

// The codes of a group as bfloat16, [blocks][half][16 pairs][16 columns][2]: worth it where many rows use them.
template <int BITS, bool MIN>
static void expand(const Format& f, const uint8_t* w, int64_t blocks, uint8_t* out) {
  constexpr int HALF = BITS == 4 ? 256 : 512, SIZE = 2 * HALF + 64 + (MIN ? 64 : 0);
  __m512i lut = code_table(f);
  for (int64_t b = 0; b < blocks; b++, w += SIZE)
    for (int half = 0; half < 2; half++)
      for (int pair = 0; pair < 16; pair++, out += 64) {
        __m512bh codes;
        if constexpr (BITS == 4)
          codes = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(w + half * HALF + pair / 4 * 64), pair % 4 * 4), lut);
        else
          codes = widen_bytes(w + half * HALF + pair * 32);
        _mm512_storeu_si512(out, (__m512i)codes);
      }
}

// `ready`: codes of this group that `expand` made, or null.
template <int BITS, bool MIN, int R, int GROUPS, bool READY>
static void quant_tile(const Format& f, const bf16* x, int64_t ldx, const float* sums, int64_t lds, const uint8_t* w, int64_t group,
                       const uint8_t* ready, int64_t blocks, float* c, int64_t ldc) {
  constexpr int N = 2 * GROUPS, HALF = BITS == 4 ? 256 : 512, SIZE = 2 * HALF + 64 + (MIN ? 64 : 0);
  __m512i lut = code_table(f);
  __m512 acc[R][N];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) acc[r][n] = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; b++, w += SIZE, x += BLOCK) {
    __m512 dot[R][N];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) dot[r][n] = _mm512_setzero_ps();
    for (int g = 0; g < (READY ? 0 : GROUPS); g++)
#pragma GCC unroll 20
      for (int line = 0; line < SIZE; line += 64) __builtin_prefetch(w + g * group + line + 2048);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m512i v[N];
      if constexpr (BITS == 4 && !READY)
        for (int n = 0; n < N; n++) v[n] = _mm512_loadu_si512(w + n / 2 * group + n % 2 * HALF + j * 64);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
          __m512bh weight;
          if constexpr (READY)
            weight = (__m512bh)_mm512_loadu_si512(ready + ((b * 2 + n) * 16 + 4 * j + i) * 64);
          else if constexpr (BITS == 4)
            weight = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v[n], 4 * i), lut);
          else
            weight = widen_bytes(w + n / 2 * group + n % 2 * HALF + (4 * j + i) * 32);
#pragma GCC unroll 6
          for (int r = 0; r < R; r++) dot[r][n] = _mm512_dpbf16_ps(dot[r][n], pair_of(x + r * ldx + (4 * j + i) * 2), weight);
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const uint8_t* tail = w + n / 2 * group + 2 * HALF + n % 2 * 32;
      __m512 scale = half_floats(tail);
      __m512 minimum = MIN ? half_floats(tail + 64) : _mm512_setzero_ps();
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        acc[r][n] = _mm512_fmadd_ps(scale, dot[r][n], acc[r][n]);
        if (MIN) acc[r][n] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[r * lds + b]), acc[r][n]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) _mm512_storeu_ps(c + r * ldc + n * 16, acc[r][n]);
}

template <int BITS, bool MIN>
static void quant_rows(const PgQuant* q, const bf16* x, int64_t ldx, int64_t rows, const float* sums, bf16* out, int64_t ldo, int64_t first,
                       int64_t last) {
  const Format& f = FORMATS[q->kind];
  int64_t blocks = q->inner / BLOCK, group = blocks * f.block_bytes(), ldc = 2 * GROUP, pieces = (rows + 5) / 6;
  alignas(64) float c[6 * 2 * GROUP];
  uint8_t* ready = pieces > 3 ? (uint8_t*)scratch<7>(blocks * 2048) : nullptr;  // then pieces have three rows or more
  for (int64_t g = first; g < last;) {
    int64_t wide = rows <= 2 && g + 1 < last ? 2 : 1;
    const uint8_t* w = (const uint8_t*)q->weight + g * group;
    if (ready) expand<BITS, MIN>(f, w, blocks, ready);
    for (int64_t piece = 0; piece < pieces; piece++) {
      int64_t m = rows * piece / pieces, count = rows * (piece + 1) / pieces - m;
      const bf16* from = x + m * ldx;
      const float* s = sums + m * blocks;
#define PG_CASE(R, G, READY) quant_tile<BITS, MIN, R, G, READY>(f, from, ldx, s, blocks, w, group, ready, blocks, c, ldc)
      if (ready)
        count == 6 ? PG_CASE(6, 1, true) : count == 5 ? PG_CASE(5, 1, true) : count == 4 ? PG_CASE(4, 1, true) : PG_CASE(3, 1, true);
      else if (wide == 2)
        count == 1 ? PG_CASE(1, 2, false) : PG_CASE(2, 2, false);
      else if (count <= 3)
        count == 1 ? PG_CASE(1, 1, false) : count == 2 ? PG_CASE(2, 1, false) : PG_CASE(3, 1, false);
      else
        count == 4 ? PG_CASE(4, 1, false) : count == 5 ? PG_CASE(5, 1, false) : PG_CASE(6, 1, false);
#undef PG_CASE
      emit(q->bias, q->outer, count, g * GROUP, wide * GROUP, c, ldc, out + m * ldo, ldo);
    }
    g += wide;
  }
}

static void quant_gemm(const PgQuant* q, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads) {
  const bf16* from = (const bf16*)x;
  const Format& f = FORMATS[q->kind];
  int64_t blocks = q->inner / BLOCK, groups = (q->outer + GROUP - 1) / GROUP;
  float* sums = (float*)scratch<6>(rows * blocks * sizeof(float) + 64);
  auto part = f.bits == 4 ? (f.minimum ? quant_rows<4, true> : quant_rows<4, false>)
                          : (f.minimum ? quant_rows<8, true> : quant_rows<8, false>);
  if (f.minimum)
    for_rows(rows, team(rows, q->inner * 2, threads), [=](int64_t r) {
      for (int64_t b = 0; b < blocks; b++)
        sums[r * blocks + b] = sum(load(from + r * x_stride + b * BLOCK) + load(from + r * x_stride + b * BLOCK + 16));
    });
  if (groups < threads) threads = (int)groups;
  if (groups * q->inner * rows < 20000) threads = 1;
#pragma omp parallel num_threads(threads > 0 ? threads : 1)
  {
    int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
    part(q, from, x_stride, rows, sums, (bf16*)out, out_stride, groups * id / team, groups * (id + 1) / team);
  }
}

#else

static void quant_gemm(const PgQuant*, const void*, int64_t, int64_t, void*, int64_t, int) { abort(); }  // the record asks for the dot product

#endif

}  // namespace PG_ISA
