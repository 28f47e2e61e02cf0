// Products with weights in blocks of 32 with a scale (and a minimum) each, as ggml stores them: they stay 4 or 8 bits wide in memory.
//
// Inputs become 15-bit integers, block by block (an error of 2^-15 of the block's largest number, under half a hundredth of what
// bfloat16 loses), in two signed bytes; products of codes and bytes are summed exactly in 32-bit integers, scales come after:
// out = Σ scale · input scale · (128 · high + low − offset · Σx) + minimum · Σx. Integers have no order, so results do not depend
// on the number of rows. This is for the 8-bit dot product of AVX-512; `quant_arm.h` and
// `quant_wide.h` are what others do with the same packed weights.
#pragma once

#include "api.h"
#include "gemm.h"
#include "microkernel.h"
#include "quant_super.h"
#include "scratch.h"

namespace PG_ISA {

constexpr int64_t BLOCK = 32;

// Bytes of one block of 32 inner indices for a group of 32 columns: codes of columns 0–15, of 16–31, scales, minima (float16).
// 8 bits: [8 quads][16 columns][4]. 4 bits: [4][16 columns][4], quad 2j in the low, quad 2j + 1 in the high half of byte j.
struct Format {
  int bits;
  bool minimum;
  int offset, most;      // of the codes as they are packed: a number is scale · (code − offset) + minimum; the largest code
  const uint8_t* table;  // from ggml's 4-bit codes to ours; null: the same
  int64_t half_bytes() const { return bits == 4 ? 256 : 512; }
  int64_t block_bytes() const { return 2 * half_bytes() + 64 + (minimum ? 64 : 0); }
};

static const uint8_t IQ4_NL_CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

static const Format FORMATS[] = {
    {4, false, 8, 15, nullptr},           // Q4_0
    {4, true, 0, 15, nullptr},            // Q4_1
    {8, false, 16, 31, nullptr},          // Q5_0
    {8, true, 0, 31, nullptr},            // Q5_1
    {8, false, 128, 255, nullptr},        // Q8_0
    {8, false, 128, 255, IQ4_NL_CODES},   // IQ4_NL
};
enum Kind { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL };
static const int64_t GGML_BYTES[] = {18, 20, 22, 24, 34, 18};

// One ggml block: 32 codes, scale and minimum as float16 bits.
static void read_block(int kind, const uint8_t* p, uint8_t* codes, uint16_t* scale, uint16_t* minimum) {
  const Format& f = FORMATS[kind];
  memcpy(scale, p, 2);
  p += 2;
  *minimum = 0;
  if (f.minimum) memcpy(minimum, p, 2), p += 2;
  if (kind == Q8_0) {
    for (int i = 0; i < 32; i++) codes[i] = (uint8_t)(p[i] + 128);
    return;
  }
  uint32_t high = 0;
  if (kind == Q5_0 || kind == Q5_1) memcpy(&high, p, 4), p += 4;
  for (int i = 0; i < 16; i++) {
    codes[i] = (uint8_t)((p[i] & 15) | (high >> i & 1) << 4);
    codes[i + 16] = (uint8_t)(p[i] >> 4 | (high >> (i + 16) & 1) << 4);
  }
  for (int i = 0; f.table && i < 32; i++) codes[i] = f.table[codes[i]];
}

static void put_code(int bits, uint8_t* half, int inner, int column, uint8_t code) {
  int quad = inner / 4, lane = column * 4 + inner % 4;
  if (bits == 8)
    half[quad * 64 + lane] = code;
  else
    half[quad / 2 * 64 + lane] = (uint8_t)(half[quad / 2 * 64 + lane] | code << quad % 2 * 4);
}

static void quant_pack(const PgQuant* q, const void* source, int64_t row_bytes, void* packed) {
  if (q->kind >= FIRST_SUPER) return super_pack(q, source, row_bytes, packed);
  const Format& f = FORMATS[q->kind];
  int64_t groups = (q->outer + GROUP - 1) / GROUP, blocks = q->inner / BLOCK, size = f.block_bytes();
#pragma omp parallel for schedule(static)
  for (int64_t g = 0; g < groups; g++)
    for (int64_t b = 0; b < blocks; b++) {
      uint8_t* out = (uint8_t*)packed + (g * blocks + b) * size;
      memset(out, 0, size);
      for (int column = 0; column < GROUP && g * GROUP + column < q->outer; column++) {
        uint8_t codes[32];
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
  if (q->kind >= FIRST_SUPER) return super_bytes(q);
  return (q->outer + GROUP - 1) / GROUP * (q->inner / BLOCK) * FORMATS[q->kind].block_bytes();
}

#if PG_DOT8

// Inputs of a call: per row and block the bytes, the scale, offset · Σ(integers), and Σ(numbers).
struct Inputs {
  int8_t *high, *low;  // [rows][inner]
  float *scale, *sum;  // [rows][blocks]
  int32_t* shift;      // [rows][blocks]
};

static Inputs carve_inputs(int64_t rows, int64_t inner) {
  int64_t bytes = (rows * inner + 63) / 64 * 64, small = (rows * (inner / BLOCK) * 4 + 63) / 64 * 64;
  char* base = (char*)scratch<6>(2 * bytes + 3 * small);
  Inputs in;
  in.high = (int8_t*)base;
  in.low = (int8_t*)(base + bytes);
  in.scale = (float*)(base + 2 * bytes);
  in.sum = (float*)(base + 2 * bytes + small);
  in.shift = (int32_t*)(base + 2 * bytes + 2 * small);
  return in;
}

template <class T>
PG_INLINE void quantise_block(const T* x, int offset, const Inputs& in, int64_t at, int64_t block) {
  vf a = load(x), b = load(x + 16);
  float largest = max(vmax(vmax(a, -a), vmax(b, -b)));
  float inverse = largest > 0 ? 16256.0f / largest : 0.0f;
  __m512i ia = _mm512_cvtps_epi32((__m512)(a * inverse)), ib = _mm512_cvtps_epi32((__m512)(b * inverse));
  __m512i round = _mm512_set1_epi32(64);
  __m512i ha = _mm512_srai_epi32(_mm512_add_epi32(ia, round), 7), hb = _mm512_srai_epi32(_mm512_add_epi32(ib, round), 7);
  _mm_storeu_si128((__m128i*)(in.high + at), _mm512_cvtepi32_epi8(ha));
  _mm_storeu_si128((__m128i*)(in.high + at + 16), _mm512_cvtepi32_epi8(hb));
  _mm_storeu_si128((__m128i*)(in.low + at), _mm512_cvtepi32_epi8(_mm512_sub_epi32(ia, _mm512_slli_epi32(ha, 7))));
  _mm_storeu_si128((__m128i*)(in.low + at + 16), _mm512_cvtepi32_epi8(_mm512_sub_epi32(ib, _mm512_slli_epi32(hb, 7))));
  int32_t total = _mm512_reduce_add_epi32(_mm512_add_epi32(ia, ib));
  in.scale[block] = largest / 16256.0f;
  in.shift[block] = offset * total;
  // Of the integers, not of the numbers: their rounding then meets the weight itself, not a code that is far from it.
  in.sum[block] = in.scale[block] * (float)total;
}

PG_INLINE __m512 half_floats(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

PG_INLINE __m512i quad_of(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return _mm512_set1_epi32(quad);
}

// Adds one block's integers, scaled, to the running sums of R rows and N halves. `tail`: the block's scales and minima.
template <bool MIN, int R, int N>
PG_INLINE void scale_block(__m512 (&acc)[R][N], const __m512i (&dot)[R][N], const uint8_t* tail, int64_t group, const Inputs& in, int64_t block,
                           int64_t blocks) {
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) {
    const uint8_t* place = tail + n / 2 * group + n % 2 * 32;
    __m512 scale = half_floats(place), minimum = MIN ? half_floats(place + 64) : _mm512_setzero_ps();
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      int64_t at = r * blocks + block;
      __m512 number = _mm512_cvtepi32_ps(_mm512_sub_epi32(dot[r][n], _mm512_set1_epi32(in.shift[at])));
      acc[r][n] = _mm512_fmadd_ps(_mm512_mul_ps(number, scale), _mm512_set1_ps(in.scale[at]), acc[r][n]);
      if (MIN) acc[r][n] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(in.sum[at]), acc[r][n]);
    }
  }
}

template <int R, int N>
PG_INLINE void emit_sums(const __m512 (&acc)[R][N], float* c) {
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) _mm512_storeu_ps(c + r * 2 * GROUP + n * 16, acc[r][n]);
}

// One or two rows straight from 4-bit codes. High halves are used in place, sixteen times too large: their sums are shifted back.
template <bool MIN, int R, int N>
static void tile4(const Inputs& in, int64_t inner, const uint8_t* w, int64_t group, float* c) {
  constexpr int SIZE = 2 * 256 + 64 + (MIN ? 64 : 0);
  int64_t blocks = inner / BLOCK;
  __m512i mask = _mm512_set1_epi8(15);
  __m512 acc[R][N] = {};
  for (int64_t b = 0; b < blocks; b++, w += SIZE) {
    for (int g = 0; g < N / 2; g++)
#pragma GCC unroll 20
      for (int line = 0; line < SIZE; line += 64) __builtin_prefetch(w + g * group + line + 2560);
    __m512i even[R][N], odd[R][N];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) even[r][n] = odd[r][n] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      const int8_t* x = (part ? in.low : in.high) + b * BLOCK;
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
          __m512i v = _mm512_loadu_si512(w + n / 2 * group + n % 2 * 256 + j * 64);
          __m512i low = _mm512_and_si512(v, mask), high = _mm512_andnot_si512(mask, v);
#pragma GCC unroll 2
          for (int r = 0; r < R; r++) {
            even[r][n] = _mm512_dpbusd_epi32(even[r][n], low, quad_of(x + r * inner + 8 * j));
            odd[r][n] = _mm512_dpbusd_epi32(odd[r][n], high, quad_of(x + r * inner + 8 * j + 4));
          }
        }
      for (int r = 0; part == 0 && r < R; r++)
        for (int n = 0; n < N; n++) even[r][n] = _mm512_slli_epi32(even[r][n], 7), odd[r][n] = _mm512_slli_epi32(odd[r][n], 7);
    }
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) even[r][n] = _mm512_add_epi32(even[r][n], _mm512_srai_epi32(odd[r][n], 4));
    scale_block<MIN>(acc, even, w + 512, group, in, b, blocks);
  }
  emit_sums(acc, c);
}

// Up to six rows with 8-bit codes: those of the weight itself, or those that `expand` made of 4-bit ones. `step`: bytes from block to
// block of the codes; scales are those of the weight. `soon`: weights that will be wanted next, 256 bytes of which are fetched with a block.
template <int TAIL, bool MIN, int R, int N>
static void tile8(const Inputs& in, int64_t inner, const uint8_t* codes, int64_t code_group, int64_t step, const uint8_t* w, int64_t group,
                  const uint8_t* soon, float* c) {
  constexpr int SIZE = TAIL + 64 + (MIN ? 64 : 0);
  int64_t blocks = inner / BLOCK;
  __m512 acc[R][N] = {};
  for (int64_t b = 0; b < blocks; b++, codes += step, w += SIZE, soon += 256) {
    if (R > 2)
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(soon + line);
    if (TAIL == 1024 && R <= 2)
      for (int g = 0; g < (N + 1) / 2; g++)
#pragma GCC unroll 20
        for (int line = 0; line < SIZE; line += 64) __builtin_prefetch(w + g * group + line + 4096);
    __m512i dot[R][N];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) dot[r][n] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      const int8_t* row[R];
      for (int r = 0; r < R; r++) row[r] = (part ? in.low : in.high) + r * inner + b * BLOCK;
      keep_addresses(row);
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
          __m512i v = _mm512_loadu_si512(codes + n / 2 * code_group + n % 2 * 512 + j * 64);
#pragma GCC unroll 6
          for (int r = 0; r < R; r++) dot[r][n] = _mm512_dpbusd_epi32(dot[r][n], v, quad_of(row[r] + 4 * j));
        }
      for (int r = 0; part == 0 && r < R; r++)
        for (int n = 0; n < N; n++) dot[r][n] = _mm512_slli_epi32(dot[r][n], 7);
    }
    scale_block<MIN>(acc, dot, w + TAIL, group, in, b, blocks);
  }
  emit_sums(acc, c);
}

// A group's 4-bit codes as bytes.
static void expand(const uint8_t* w, int64_t size, int64_t blocks, uint8_t* out) {
  __m512i mask = _mm512_set1_epi8(15);
  for (int64_t b = 0; b < blocks; b++, w += size)
    for (int line = 0; line < 8; line++, out += 128) {
      __m512i v = _mm512_loadu_si512(w + line * 64);
      _mm512_storeu_si512(out, _mm512_and_si512(v, mask));
      _mm512_storeu_si512(out + 64, _mm512_and_si512(_mm512_srli_epi16(v, 4), mask));
    }
}

template <class T, int BITS, bool MIN>
static void quant_rows(const PgQuant* q, const Inputs& all, int64_t rows, T* out, int64_t ldo, int64_t first, int64_t last) {
  constexpr int TAIL = BITS == 4 ? 512 : 1024, SIZE = TAIL + 64 + (MIN ? 64 : 0);
  int64_t inner = q->inner, blocks = inner / BLOCK, group = blocks * SIZE, pieces = (rows + 5) / 6;
  alignas(64) float c[6 * 2 * GROUP];
  uint8_t* ready = BITS == 4 && rows > 2 ? (uint8_t*)scratch<7>(blocks * 1024) : nullptr;
  for (int64_t g = first; g < last;) {
    int64_t wide = rows <= 2 && g + 1 < last ? 2 : 1;
    const uint8_t* w = (const uint8_t*)q->weight + g * group;
    if (ready) expand(w, SIZE, blocks, ready);
    const uint8_t* codes = ready ? ready : w;
    int64_t step = ready ? 1024 : SIZE;
    for (int64_t piece = 0; piece < pieces; piece++) {
      int64_t m = rows * piece / pieces, count = rows * (piece + 1) / pieces - m;
      Inputs in{all.high + m * inner, all.low + m * inner, all.scale + m * blocks, all.sum + m * blocks, all.shift + m * blocks};
#define PG_TILE8(R, N) tile8<TAIL, MIN, R, N>(in, inner, codes, group, step, w, group, w + group + piece * blocks * 256, c)
#define PG_TILE(R, N) (BITS == 4 ? tile4<MIN, R, N>(in, inner, w, group, c) : PG_TILE8(R, N))
      if (count == 1)
        wide == 2 ? PG_TILE(1, 4) : PG_TILE(1, 2);
      else if (count == 2)
        wide == 2 && rows == 2 ? PG_TILE(2, 4) : rows == 2 ? PG_TILE(2, 2) : PG_TILE8(2, 2);
      else if (count <= 4)
        count == 3 ? PG_TILE8(3, 2) : PG_TILE8(4, 2);
      else
        count == 5 ? PG_TILE8(5, 2) : PG_TILE8(6, 2);
#undef PG_TILE
#undef PG_TILE8
      emit(q->bias, q->outer, count, g * GROUP, wide * GROUP, c, 2 * GROUP, out + m * ldo, ldo);
    }
    g += wide;
  }
}

constexpr int64_t INPUT_BYTES = 1 << 20;  // of inputs that one thread takes through all its columns: they stay in its second-level cache

template <class T>
static void quant_product(const PgQuant* q, const T* x, int64_t x_stride, int64_t rows, T* out, int64_t out_stride, int threads) {
  const Format& f = FORMATS[q->kind];
  int64_t inner = q->inner, blocks = inner / BLOCK, groups = (q->outer + GROUP - 1) / GROUP;
  Inputs in = carve_inputs(rows, inner);
  for_rows(rows, team(rows, inner * 4, threads), [=](int64_t r) {
    for (int64_t b = 0; b < blocks; b++) quantise_block(x + r * x_stride + b * BLOCK, f.offset, in, r * inner + b * BLOCK, r * blocks + b);
  });
  auto part = f.bits == 4 ? (f.minimum ? quant_rows<T, 4, true> : quant_rows<T, 4, false>)
                          : (f.minimum ? quant_rows<T, 8, true> : quant_rows<T, 8, false>);
  if (groups < threads) threads = (int)groups;
  if (groups * inner * rows < 20000) threads = 1;
  int64_t most = INPUT_BYTES / (2 * inner + 12 * blocks) / 6 * 6;
  if (most < 96) most = 96;
  auto columns = [&](int64_t first, int64_t last) {
    for (int64_t m = 0; m < rows; m += most) {
      Inputs some{in.high + m * inner, in.low + m * inner, in.scale + m * blocks, in.sum + m * blocks, in.shift + m * blocks};
      part(q, some, rows - m < most ? rows - m : most, out + m * out_stride, out_stride, first, last);
    }
  };
  parallel_spans(groups, threads, columns, groups >= 2 * threads ? 2 : 1);
}

// Panels of integers for prompts: offsets and minima are in them.
struct BlockPanels {
  static constexpr bool AHEAD = false;
  const PgQuant* q;

  // Four inner indices of sixteen columns.
  PG_INLINE void put_quad(__m512i codes, __m512 scale, __m512 shift, int16_t* out) {
    __m512i mask = _mm512_set1_epi32(255);
    for (int pair = 0; pair < 2; pair++) {
      __m512i even = _mm512_and_si512(_mm512_srli_epi32(codes, 16 * pair), mask);
      __m512i odd = _mm512_and_si512(_mm512_srli_epi32(codes, 16 * pair + 8), mask);
      put_pair(_mm512_fmadd_ps(_mm512_cvtepi32_ps(even), scale, shift), _mm512_fmadd_ps(_mm512_cvtepi32_ps(odd), scale, shift),
               out + pair * 2 * GROUP);
    }
  }

  // One block of sixteen columns; a number is scale · code + shift.
  PG_INLINE void put_block(int bits, const uint8_t* codes, __m512 scale, __m512 shift, int16_t* out) {
    __m512i low = _mm512_set1_epi8(15);
    for (int line = 0; line < bits; line++) {
      __m512i v = _mm512_loadu_si512(codes + line * 64);
      if (bits == 8) {
        put_quad(v, scale, shift, out + line * 4 * GROUP);
      } else {
        put_quad(_mm512_and_si512(v, low), scale, shift, out + line * 8 * GROUP);
        put_quad(_mm512_and_si512(_mm512_srli_epi16(v, 4), low), scale, shift, out + line * 8 * GROUP + 4 * GROUP);
      }
    }
  }

  // Up to two blocks of sixteen columns with one scale.
  void put_span(const Format& f, const uint8_t* w, int half, int64_t blocks, IntPanel to) const {
    __m512 scale[2], shift[2];
    __m512i top = _mm512_setzero_si512();
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* tail = w + b * f.block_bytes() + 2 * f.half_bytes() + half * 32;
      scale[b] = half_floats(tail);
      shift[b] = _mm512_fnmadd_ps(scale[b], _mm512_set1_ps((float)f.offset), f.minimum ? half_floats(tail + 64) : _mm512_setzero_ps());
      __m512 end = _mm512_fmadd_ps(scale[b], _mm512_set1_ps((float)f.most), shift[b]);
      top = _mm512_max_epi32(top, _mm512_max_epi32(magnitude((vf)shift[b]), magnitude((vf)end)));
    }
    __m512 inverse = reciprocal((__m512)top, LARGEST_RIGHT);
    _mm512_storeu_ps(to.scale + half * W, _mm512_mul_ps((__m512)top, _mm512_set1_ps(1.0f / LARGEST_RIGHT)));
    for (int64_t b = 0; b < blocks; b++)
      put_block(f.bits, w + b * f.block_bytes() + half * f.half_bytes(), _mm512_mul_ps(scale[b], inverse), _mm512_mul_ps(shift[b], inverse),
                to.w + half * 2 * W + b * BLOCK * GROUP);
    clear_pairs(blocks * BLOCK / 2, to.w + half * 2 * W);
  }

  void operator()(int64_t group, int64_t k, int64_t depth, IntPanel to) const {
    const Format& f = FORMATS[q->kind];
    const uint8_t* w = (const uint8_t*)q->weight + (group * (q->inner / BLOCK) + k / BLOCK) * f.block_bytes();
    for (int64_t s = 0; s < depth; s += SPAN, w += SPAN / BLOCK * f.block_bytes(), to.w += SPAN * GROUP, to.scale += GROUP)
      for (int half = 0; half < 2; half++) put_span(f, w, half, (depth - s < SPAN ? depth - s : SPAN) / BLOCK, to);
  }
};

template <class T>
static void quant_typed(const PgQuant* q, const T* x, int64_t x_stride, int64_t rows, T* out, int64_t out_stride, int threads) {
  if (q->any_order && rows >= MANY_ROWS)
    int_product(IntShape{q->inner, q->outer, q->bias}, BlockPanels{q}, int_step(q->inner), x, x_stride, rows, out, out_stride, threads);
  else
    quant_product(q, x, x_stride, rows, out, out_stride, threads);
}

static void quant_gemm(const PgQuant* q, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads) {
  if (q->kind >= FIRST_SUPER) return super_gemm(q, x, x_stride, rows, out, out_stride, threads);
  if (q->type == PG_F32)
    quant_typed(q, (const float*)x, x_stride, rows, (float*)out, out_stride, threads);
  else
    quant_typed(q, (const bf16*)x, x_stride, rows, (bf16*)out, out_stride, threads);
}

#endif

}  // namespace PG_ISA

#if PG_DOT_ARM
#include "quant_arm.h"
#elif !PG_DOT8
#include "quant_wide.h"
#endif
