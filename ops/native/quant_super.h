// Products with weights in super-blocks of 256 (ggml's K and IQ formats): they stay in their 2 to 6 bits in memory.
//
// A panel of 256 inner indices × 32 columns is expanded to 16-bit codes with a scale and a minimum per run of 16 or 32, in the
// first-level cache, and meets all rows. With the integer dot product inputs become 15-bit integers per run and sums of a run are exact;
// elsewhere the panel becomes float32. One chain of sums a result: results do not depend on the number of rows.
#pragma once


#include "api.h"
#include "gemm.h"
#include "microkernel.h"
#include "pointwise.h"
#include "scratch.h"

namespace PG_ISA {

constexpr int64_t SUPER = 256;
constexpr int LINE = 2 * GROUP;           // codes of two inner indices and 32 columns, `[32][2]`
constexpr int LINES = (int)SUPER / 2;
constexpr int FIRST_SUPER = 6;            // kinds below are those of `quant.h`

// Low bits of codes are packed two or four lines to a byte, further bits four or eight.
struct SuperFormat {
  int run, low, high, offset;  // elements of a run; bits of each plane, high 0: none; subtracted from codes
  bool minimum, table;
  int bytes, grid;             // of ggml's block; entries' width of the grid, 0: planes
};

enum SuperKind { Q2_K = FIRST_SUPER, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M };

static const SuperFormat SUPERS[] = {
    {16, 2, 0, 0, true, false, 84, 0},    // Q2_K
    {16, 2, 1, 4, false, false, 110, 0},  // Q3_K
    {32, 4, 0, 0, true, false, 144, 0},   // Q4_K
    {32, 4, 1, 0, true, false, 176, 0},   // Q5_K
    {16, 4, 2, 32, false, false, 210, 0}, // Q6_K
    {32, 4, 0, 0, false, true, 136, 0},   // IQ4_XS
    {32, 0, 0, 0, false, false, 66, 8},   // IQ2_XXS
    {16, 0, 0, 0, false, false, 74, 8},   // IQ2_XS
    {16, 0, 0, 0, false, false, 82, 8},   // IQ2_S
    {32, 0, 0, 0, false, false, 98, 4},   // IQ3_XXS
    {32, 0, 0, 0, false, false, 110, 4},  // IQ3_S
    {32, 0, 0, 0, false, false, 50, 8},   // IQ1_S
    {16, 0, 0, 0, false, false, 56, 8},   // IQ1_M
};
static const SuperFormat& super_format(int kind) { return SUPERS[kind - FIRST_SUPER]; }

static const int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Where the parts of a packed super-block of a group of 32 columns lie.
struct SuperParts {
  int high, scale, minimum, d, dmin, size;
  explicit SuperParts(const SuperFormat& f, bool nibble_minimum) {
    int runs = (int)SUPER / f.run;
    high = LINES * LINE * f.low / 8;
    scale = high + LINES * LINE * f.high / 8;
    minimum = scale + runs * GROUP;
    d = minimum + (f.minimum && !nibble_minimum ? runs * GROUP : 0);
    dmin = d + 2 * GROUP;
    size = dmin + (f.minimum ? 2 * GROUP : 0);
    if (f.grid) size = f.bytes * GROUP;
  }
};
static SuperParts super_parts(int kind) { return SuperParts(super_format(kind), kind == Q2_K); }

// One block of one column, as its planes are packed.
struct SuperBlock {
  uint8_t code[SUPER], scale[16], minimum[16];
  uint16_t d, dmin;
};

PG_INLINE uint16_t word_at(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }
PG_INLINE uint32_t long_at(const uint8_t* p) { return (uint32_t)word_at(p) | (uint32_t)word_at(p + 2) << 16; }

// Runs of `span` bytes hold `8 / bits` runs of codes, lowest bits first.
static void unpack_fields(const uint8_t* from, int bytes, int span, int bits, int shift, uint8_t* code) {
  for (int run = 0; run < bytes / span; run++)
    for (int field = 0; field < 8 / bits; field++)
      for (int i = 0; i < span; i++) *code++ |= (uint8_t)((from[run * span + i] >> field * bits & ((1 << bits) - 1)) << shift);
}

static void six_bit_scales(const uint8_t* p, SuperBlock* b) {
  for (int i = 0; i < 4; i++) {
    b->scale[i] = p[i] & 63, b->minimum[i] = p[4 + i] & 63;
    b->scale[4 + i] = (uint8_t)((p[8 + i] & 15) | (p[i] >> 2 & 48));
    b->minimum[4 + i] = (uint8_t)((p[8 + i] >> 4) | (p[4 + i] >> 2 & 48));
  }
}

static void read_super(int kind, const uint8_t* p, SuperBlock* b) {
  memset(b, 0, sizeof *b);
  switch (kind) {
    case Q2_K:
      unpack_fields(p + 16, 64, 32, 2, 0, b->code);
      memcpy(b->scale, p, 16);
      b->d = word_at(p + 80), b->dmin = word_at(p + 82);
      break;
    case Q3_K:
      unpack_fields(p + 32, 64, 32, 2, 0, b->code);
      unpack_fields(p, 32, 32, 1, 2, b->code);
      for (int i = 0; i < 16; i++) b->scale[i] = (uint8_t)(((p[96 + i % 8] >> i / 8 * 4 & 15) | (p[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
      b->d = word_at(p + 108);
      break;
    case Q4_K:
      unpack_fields(p + 16, 128, 32, 4, 0, b->code);
      six_bit_scales(p + 4, b);
      b->d = word_at(p), b->dmin = word_at(p + 2);
      break;
    case Q5_K:
      unpack_fields(p + 48, 128, 32, 4, 0, b->code);
      unpack_fields(p + 16, 32, 32, 1, 4, b->code);
      six_bit_scales(p + 4, b);
      b->d = word_at(p), b->dmin = word_at(p + 2);
      break;
    case Q6_K:
      unpack_fields(p, 128, 64, 4, 0, b->code);
      unpack_fields(p + 128, 64, 32, 2, 4, b->code);
      memcpy(b->scale, p + 192, 16);
      b->d = word_at(p + 208);
      break;
    case IQ4_XS:
      unpack_fields(p + 8, 128, 16, 4, 0, b->code);
      for (int i = 0; i < 8; i++) b->scale[i] = (uint8_t)(((p[4 + i / 2] >> i % 2 * 4 & 15) | (word_at(p + 2) >> 2 * i & 3) << 4) - 32);
      b->d = word_at(p);
      break;
  }
}

PG_INLINE void put_bits(uint8_t* plane, int bits, int line, int place, int value) {
  int per = 8 / bits;
  uint8_t* byte = plane + line / per * LINE + place;
  *byte = (uint8_t)(*byte | value << line % per * bits);
}

static void pack_super(int kind, const SuperFormat& f, const SuperParts& at, const uint8_t* source, int column, uint8_t* out) {
  SuperBlock b;
  read_super(kind, source, &b);
  for (int i = 0; i < SUPER; i++) {
    put_bits(out, f.low, i / 2, column * 2 + i % 2, b.code[i] & ((1 << f.low) - 1));
    if (f.high) put_bits(out + at.high, f.high, i / 2, column * 2 + i % 2, b.code[i] >> f.low);
  }
  for (int r = 0; r < SUPER / f.run; r++) {
    out[at.scale + r * GROUP + column] = b.scale[r];
    if (at.d > at.minimum) out[at.minimum + r * GROUP + column] = b.minimum[r];
  }
  memcpy(out + at.d + 2 * column, &b.d, 2);
  if (f.minimum) memcpy(out + at.dmin + 2 * column, &b.dmin, 2);
}

static void super_pack(const PgQuant* q, const void* source, int64_t row_bytes, void* packed) {
  const SuperFormat& f = super_format(q->kind);
  SuperParts at = super_parts(q->kind);
  int64_t groups = (q->outer + GROUP - 1) / GROUP, blocks = q->inner / SUPER;
#pragma omp parallel for schedule(static)
  for (int64_t g = 0; g < groups; g++)
    for (int64_t b = 0; b < blocks; b++) {
      uint8_t* out = (uint8_t*)packed + (g * blocks + b) * at.size;
      memset(out, 0, at.size);
      for (int column = 0; column < GROUP && g * GROUP + column < q->outer; column++) {
        const uint8_t* block = (const uint8_t*)source + (g * GROUP + column) * row_bytes + b * f.bytes;
        if (f.grid)
          memcpy(out + column * f.bytes, block, f.bytes);
        else
          pack_super(q->kind, f, at, block, column, out);
      }
    }
}

static int64_t super_bytes(const PgQuant* q) { return (q->outer + GROUP - 1) / GROUP * (q->inner / SUPER) * super_parts(q->kind).size; }

// 256 inner indices of 32 columns: a number is scale · code + minimum.
struct alignas(64) Panel {
  int16_t code[LINES * LINE];
  float scale[16 * GROUP], minimum[16 * GROUP];
};

PG_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 5.9604644775390625e-8f;
  uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

template <int LOW, int HIGH, int OFFSET>
static void expand_planes(const uint8_t* low, const uint8_t* high, int16_t* code) {
  for (int eight = 0; eight < LINES / 8; eight++, low += LOW * LINE, high += HIGH * LINE, code += 8 * LINE)
#pragma GCC unroll 8
    for (int line = 0; line < 8; line++) {
      constexpr int PER = 8 / LOW, PER_HIGH = HIGH ? 8 / (HIGH ? HIGH : 1) : 1;
      for (int i = 0; i < LINE; i++) {
        uint8_t v = (uint8_t)((uint8_t)(low[line / PER * LINE + i] >> line % PER * LOW) & ((1 << LOW) - 1));
        if (HIGH) v = (uint8_t)(v | ((uint8_t)(high[line / PER_HIGH * LINE + i] >> line % PER_HIGH * HIGH) & ((1 << HIGH) - 1)) << LOW);
        code[line * LINE + i] = (int16_t)(v - OFFSET);
      }
    }
}

static void look_up_levels(int16_t* code) {
#if PG_W == 16
  __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)IQ4_LEVELS));
  for (int i = 0; i < LINES * LINE; i += 32) {
    __m512i v = _mm512_loadu_si512(code + i);  // a code in each 16-bit lane: looked up in its high byte, and shifted down with its sign
    v = _mm512_shuffle_epi8(table, _mm512_or_si512(_mm512_slli_epi16(v, 8), _mm512_set1_epi16(0x80)));
    _mm512_storeu_si512(code + i, _mm512_srai_epi16(v, 8));
  }
#else
  for (int i = 0; i < LINES * LINE; i++) code[i] = IQ4_LEVELS[code[i]];
#endif
}

static void expand_scales(int kind, const SuperFormat& f, const SuperParts& at, const uint8_t* w, Panel* p) {
  alignas(64) float d[GROUP], dmin[GROUP];
  for (int c = 0; c < GROUP; c++) {
    d[c] = half_to_float(word_at(w + at.d + 2 * c));
    dmin[c] = f.minimum ? half_to_float(word_at(w + at.dmin + 2 * c)) : 0.0f;
  }
  for (int r = 0; r < SUPER / f.run; r++) {
    const uint8_t *scale = w + at.scale + r * GROUP, *minimum = w + at.minimum + r * GROUP;
    float *s = p->scale + r * GROUP, *m = p->minimum + r * GROUP;
    if (kind == Q2_K)
      for (int c = 0; c < GROUP; c++) s[c] = d[c] * (float)(scale[c] & 15), m[c] = -dmin[c] * (float)(scale[c] >> 4);
    else if (f.minimum)
      for (int c = 0; c < GROUP; c++) s[c] = d[c] * (float)scale[c], m[c] = -dmin[c] * (float)minimum[c];
    else
      for (int c = 0; c < GROUP; c++) s[c] = d[c] * (float)(int8_t)scale[c];
  }
}

// Where the codes of a grid entry go: sign 0 or −1 for each, `delta` of IQ1 is added.
PG_INLINE void put_entry(int16_t* code, int at, int column, const int8_t* entry, int count, int signs, int times, int delta) {
  for (int i = 0; i < count; i++) {
    int v = entry[i] * times + delta;
    code[(at + i) / 2 * LINE + column * 2 + i % 2] = (int16_t)(signs >> i & 1 ? -v : v);
  }
}

PG_INLINE int with_parity(int seven) { return seven | (__builtin_popcount((unsigned)seven) & 1) << 7; }

static void expand_iq2(int kind, const uint8_t* b, const int8_t* grid, int column, Panel* p) {
  float d = half_to_float(word_at(b));
  for (int i = 0; i < 32; i++) {
    int index, signs;
    if (kind == IQ2_XXS) {
      index = b[2 + i / 4 * 8 + i % 4];
      signs = with_parity((int)(long_at(b + 6 + i / 4 * 8) >> i % 4 * 7 & 127));
    } else if (kind == IQ2_XS) {
      int code = word_at(b + 2 + 2 * i);
      index = code & 511, signs = with_parity(code >> 9);
    } else {
      index = b[2 + i] | (b[66 + i / 4] >> i % 4 * 2 & 3) << 8, signs = b[34 + i];
    }
    put_entry(p->code, i * 8, column, grid + index * 8, 8, signs, 1, 0);
  }
  for (int r = 0; r < 8; r++)
    if (kind == IQ2_XXS)
      p->scale[r * GROUP + column] = d * (0.5f + (float)(long_at(b + 6 + r * 8) >> 28)) * 0.25f;
    else
      for (int half = 0; half < 2; half++)
        p->scale[(2 * r + half) * GROUP + column] = d * (0.5f + (float)(b[(kind == IQ2_XS ? 66 : 74) + r] >> half * 4 & 15)) * 0.25f;
}

static void expand_iq3(int kind, const uint8_t* b, const int8_t* grid, int column, Panel* p) {
  float d = half_to_float(word_at(b));
  for (int i = 0; i < 64; i++) {
    int index = b[2 + i], eight = i / 2, signs;
    if (kind == IQ3_XXS)
      signs = with_parity((int)(long_at(b + 66 + eight / 4 * 4) >> eight % 4 * 7 & 127));
    else
      index |= (b[66 + i / 8] >> i % 8 & 1) << 8, signs = b[74 + eight];
    put_entry(p->code, i * 4, column, grid + index * 4, 4, signs >> i % 2 * 4, 1, 0);
  }
  for (int r = 0; r < 8; r++)
    p->scale[r * GROUP + column] = kind == IQ3_XXS ? d * (0.5f + (float)(long_at(b + 66 + 4 * r) >> 28)) * 0.5f
                                                   : d * (float)(1 + 2 * (b[106 + r / 2] >> r % 2 * 4 & 15));
}

// Codes are eight times the grid's, plus or minus one.
static void expand_iq1(int kind, const uint8_t* b, const int8_t* grid, int column, Panel* p) {
  if (kind == IQ1_S) {
    float d = half_to_float(word_at(b)) * 0.125f;
    for (int r = 0; r < 8; r++) {
      int high = word_at(b + 34 + 2 * r), delta = high >> 15 ? -1 : 1;
      for (int i = 0; i < 4; i++)
        put_entry(p->code, r * 32 + i * 8, column, grid + (b[2 + r * 4 + i] | (high >> 3 * i & 7) << 8) * 8, 8, 0, 8, delta);
      p->scale[r * GROUP + column] = d * (float)(2 * (high >> 12 & 7) + 1);
    }
    return;
  }
  uint16_t bits = 0;
  for (int i = 0; i < 4; i++) bits = (uint16_t)(bits | (word_at(b + 48 + 2 * i) & 0xf000) >> (12 - 4 * i));
  float d = half_to_float(bits) * 0.125f;
  for (int i = 0; i < 32; i++) {
    int high = b[32 + i / 2] >> i % 2 * 4 & 15;
    put_entry(p->code, i * 8, column, grid + (b[i] | (high & 7) << 8) * 8, 8, 0, 8, high >> 3 ? -1 : 1);
  }
  for (int r = 0; r < 16; r++) p->scale[r * GROUP + column] = d * (float)(2 * (word_at(b + 48 + r / 4 * 2) >> 3 * (r % 4) & 7) + 1);
}

static void expand_super(const PgQuant* q, const SuperFormat& f, const SuperParts& at, const uint8_t* w, Panel* p) {
  if (f.grid) {
    auto expand = q->kind <= IQ2_S ? expand_iq2 : q->kind <= IQ3_S ? expand_iq3 : expand_iq1;
    for (int column = 0; column < GROUP; column++) expand(q->kind, w + column * f.bytes, q->grid, column, p);
    return;
  }
  switch (q->kind) {
    case Q2_K: expand_planes<2, 0, 0>(w, w, p->code); break;
    case Q3_K: expand_planes<2, 1, 4>(w, w + at.high, p->code); break;
    case Q4_K: expand_planes<4, 0, 0>(w, w, p->code); break;
    case Q5_K: expand_planes<4, 1, 0>(w, w + at.high, p->code); break;
    case Q6_K: expand_planes<4, 2, 32>(w, w + at.high, p->code); break;
    case IQ4_XS: expand_planes<4, 0, 0>(w, w, p->code), look_up_levels(p->code); break;
  }
  expand_scales(q->kind, f, at, w, p);
}

#if PG_DOT8

// Inputs of a call, of which each row is [inner] integers, [inner / run] scales, [inner / run] sums.
struct SuperRows {
  int16_t* x;
  float *scale, *sum;
};

template <class T>
static SuperRows super_rows(const T* x, int64_t x_stride, int64_t rows, int64_t inner, int64_t run, int threads) {
  int64_t runs = inner / run;
  char* base = (char*)scratch<10>(rows * inner * 2 + 2 * rows * runs * 4);
  SuperRows in{(int16_t*)base, (float*)(base + rows * inner * 2), (float*)(base + rows * inner * 2) + rows * runs};
  for_rows(rows, team(rows, inner * 2, threads), [=](int64_t r) {
    for (int64_t s = 0; s < runs; s++) {
      const T* from = x + r * x_stride + s * run;
      vf a = load(from), b = run == 32 ? load(from + W) : vf{};
      __m512i bits = _mm512_set1_epi32(0x7fffffff);
      __m512i top = _mm512_max_epi32(_mm512_and_si512((__m512i)a, bits), _mm512_and_si512((__m512i)b, bits));
      float largest = _mm512_cvtss_f32((__m512)_mm512_set1_epi32(_mm512_reduce_max_epi32(top)));
      float inverse = largest > 1e-30f ? 16256.0f / largest : 0.0f;
      __m512i ia = _mm512_cvtps_epi32((__m512)(a * inverse)), ib = _mm512_cvtps_epi32((__m512)(b * inverse));
      int16_t* to = in.x + r * inner + s * run;
      _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(ia));
      if (run == 32) _mm256_storeu_si256((__m256i*)(to + W), _mm512_cvtepi32_epi16(ib));
      in.scale[r * runs + s] = largest / 16256.0f;
      in.sum[r * runs + s] = largest / 16256.0f * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(ia, ib));
    }
  });
  return in;
}

// c[R][32] (+)= x · panel for R rows.
template <int RUN, bool MIN, int R>
static void super_tile(const SuperRows& in, int64_t inner, const Panel* p, float* c, bool add) {
  const int16_t* x = in.x;
  int64_t runs = inner / RUN;
  __m512 acc[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int n = 0; n < 2; n++) acc[r][n] = add ? _mm512_loadu_ps(c + r * GROUP + n * W) : _mm512_setzero_ps();
  const int16_t* row[R];
  for (int s = 0; s < SUPER / RUN; s++, x += RUN) {
    const int16_t* w = p->code + s * RUN / 2 * LINE;
    for (int r = 0; r < R; r++) row[r] = x + r * inner;
    keep_addresses(row);
    __m512i dot[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) dot[r][0] = dot[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int k = 0; k < RUN / 2; k++) {
      __m512i w0 = _mm512_load_si512(w + k * LINE), w1 = _mm512_load_si512(w + k * LINE + 2 * W);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, row[r] + 2 * k, 4);
        __m512i both = _mm512_set1_epi32(pair);
        dot[r][0] = _mm512_dpwssd_epi32(dot[r][0], w0, both);
        dot[r][1] = _mm512_dpwssd_epi32(dot[r][1], w1, both);
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
      __m512 scale = _mm512_load_ps(p->scale + s * GROUP + n * W), minimum = MIN ? _mm512_load_ps(p->minimum + s * GROUP + n * W) : scale;
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        __m512 number = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][n]), scale);
        acc[r][n] = _mm512_fmadd_ps(number, _mm512_set1_ps(in.scale[r * runs + s]), acc[r][n]);
        if (MIN) acc[r][n] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(in.sum[r * runs + s]), acc[r][n]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int n = 0; n < 2; n++) _mm512_storeu_ps(c + r * GROUP + n * W, acc[r][n]);
}

template <int RUN, bool MIN>
static void super_multiply(const SuperRows& in, int64_t inner, int64_t rows, const Panel* p, float* c, bool add) {
  int64_t pieces = (rows + 5) / 6, runs = inner / RUN;
  for (int64_t piece = 0; piece < pieces; piece++) {
    int64_t m = rows * piece / pieces, count = rows * (piece + 1) / pieces - m;
    SuperRows mine{in.x + m * inner, in.scale + m * runs, in.sum + m * runs};
    float* target = c + m * GROUP;
    switch (count) {
      case 1: super_tile<RUN, MIN, 1>(mine, inner, p, target, add); break;
      case 2: super_tile<RUN, MIN, 2>(mine, inner, p, target, add); break;
      case 3: super_tile<RUN, MIN, 3>(mine, inner, p, target, add); break;
      case 4: super_tile<RUN, MIN, 4>(mine, inner, p, target, add); break;
      case 5: super_tile<RUN, MIN, 5>(mine, inner, p, target, add); break;
      default: super_tile<RUN, MIN, 6>(mine, inner, p, target, add);
    }
  }
}

template <class T>
struct SuperInputs {
  SuperRows rows;
  SuperInputs(const SuperFormat& f, const T* x, int64_t x_stride, int64_t count, int64_t inner, int threads)
      : rows(super_rows(x, x_stride, count, inner, f.run, threads)) {}
  void multiply_panel(const SuperFormat& f, int64_t inner, int64_t k, int64_t m, int64_t count, const Panel* p, float* c) const {
    int64_t runs = inner / f.run, at = m * runs + k / f.run;
    SuperRows mine{rows.x + m * inner + k, rows.scale + at, rows.sum + at};
    auto product = f.run == 16 ? (f.minimum ? super_multiply<16, true> : super_multiply<16, false>)
                               : (f.minimum ? super_multiply<32, true> : super_multiply<32, false>);
    product(mine, inner, count, p, c, k > 0);
  }
};

// Panels of integers for prompts: the numbers of a super-block, whatever its kind, with one scale for 64 inner indices.
struct SuperPanels {
  static constexpr bool AHEAD = false;
  const PgQuant* q;

  // `pairs` of one run: sixteen columns of 32-bit lanes that hold two codes each.
  PG_INLINE void numbers(const int16_t* code, __m512 scale, __m512 shift, __m512* even, __m512* odd) {
    __m512i v = _mm512_load_si512(code);
    *even = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 16), 16)), scale, shift);
    *odd = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(v, 16)), scale, shift);
  }

  void put_span(const SuperFormat& f, const Panel& p, int span, int half, IntPanel to) const {
    const int16_t* code = p.code + span * SPAN * GROUP + half * 2 * W;
    const float *scale = p.scale + span * SPAN / f.run * GROUP + half * W, *minimum = p.minimum + span * SPAN / f.run * GROUP + half * W;
    __m512i top = _mm512_setzero_si512();
    __m512 even, odd;
    for (int i = 0; i < SPAN / 2; i++) {
      int run = 2 * i / f.run * GROUP;
      numbers(code + i * LINE, _mm512_load_ps(scale + run), f.minimum ? _mm512_load_ps(minimum + run) : _mm512_setzero_ps(), &even, &odd);
      top = _mm512_max_epi32(top, _mm512_max_epi32(magnitude((vf)even), magnitude((vf)odd)));
    }
    __m512 inverse = reciprocal((__m512)top, LARGEST_RIGHT);
    _mm512_storeu_ps(to.scale + half * W, _mm512_mul_ps((__m512)top, _mm512_set1_ps(1.0f / LARGEST_RIGHT)));
    for (int i = 0; i < SPAN / 2; i++) {
      int run = 2 * i / f.run * GROUP;
      numbers(code + i * LINE, _mm512_mul_ps(_mm512_load_ps(scale + run), inverse),
              f.minimum ? _mm512_mul_ps(_mm512_load_ps(minimum + run), inverse) : _mm512_setzero_ps(), &even, &odd);
      put_pair(even, odd, to.w + half * 2 * W + i * 2 * GROUP);
    }
  }

  void operator()(int64_t group, int64_t k, int64_t, IntPanel to) const {
    const SuperFormat& f = super_format(q->kind);
    SuperParts at = super_parts(q->kind);
    Panel* panel = (Panel*)scratch<11>(sizeof(Panel));
    expand_super(q, f, at, (const uint8_t*)q->weight + (group * (q->inner / SUPER) + k / SUPER) * at.size, panel);
    for (int span = 0; span < SUPER / SPAN; span++, to.w += SPAN * GROUP, to.scale += GROUP)
      for (int half = 0; half < 2; half++) put_span(f, *panel, span, half, to);
  }
};

#else

template <class T>
struct SuperInputs {
  const float* x;
  int64_t stride;
  SuperInputs(const SuperFormat&, const T* from, int64_t x_stride, int64_t count, int64_t inner, int threads) : stride(inner) {
    float* wide = (float*)scratch<10>(count * inner * sizeof(float));
    for_rows(count, team(count, inner, threads), [=](int64_t r) {
      for (int64_t i = 0; i < inner; i += W) store(wide + r * inner + i, load(from + r * x_stride + i));
    });
    x = wide;
  }
  void multiply_panel(const SuperFormat& f, int64_t, int64_t k, int64_t m, int64_t count, const Panel* p, float* c) const {
    float* w = (float*)scratch<12>(SUPER * GROUP * sizeof(float));
    for (int i = 0; i < SUPER; i++) {
      const int16_t* code = p->code + i / 2 * LINE + i % 2;
      const float *scale = p->scale + i / f.run * GROUP, *minimum = p->minimum + i / f.run * GROUP;
      for (int c = 0; c < GROUP; c++) w[i * GROUP + c] = (float)code[2 * c] * scale[c] + (f.minimum ? minimum[c] : 0.0f);
    }
    multiply<F32>(count, 1, x + m * stride + k, stride, w, SUPER * GROUP, SUPER, c, GROUP, k > 0);
  }
};

#endif

constexpr int64_t SUPER_ROWS = 1024;  // rows whose partial sums stay in the second-level cache

template <class T>
static void super_part(const PgQuant* q, const SuperInputs<T>& in, int64_t rows, T* out, int64_t ldo, int64_t first, int64_t last) {
  const SuperFormat& f = super_format(q->kind);
  SuperParts at = super_parts(q->kind);
  int64_t blocks = q->inner / SUPER;
  char* memory = (char*)scratch<11>(sizeof(Panel) + SUPER_ROWS * GROUP * sizeof(float));
  Panel* panel = (Panel*)memory;
  float* sums = (float*)(memory + sizeof(Panel));
  for (int64_t m = 0; m < rows; m += SUPER_ROWS) {
    int64_t count = rows - m < SUPER_ROWS ? rows - m : SUPER_ROWS;
    for (int64_t g = first; g < last; g++) {
      for (int64_t b = 0; b < blocks; b++) {
        expand_super(q, f, at, (const uint8_t*)q->weight + (g * blocks + b) * at.size, panel);
        in.multiply_panel(f, q->inner, b * SUPER, m, count, panel, sums);
      }
      emit(q->bias, q->outer, count, g * GROUP, GROUP, sums, GROUP, out + m * ldo, ldo);
    }
  }
}

template <class T>
static void super_product(const PgQuant* q, const T* x, int64_t x_stride, int64_t rows, T* out, int64_t out_stride, int threads) {
#if PG_DOT8
  if (q->any_order && rows >= MANY_ROWS)
    return int_product(IntShape{q->inner, q->outer, q->bias}, SuperPanels{q}, SUPER, x, x_stride, rows, out, out_stride, threads);
#endif
  SuperInputs<T> in(super_format(q->kind), x, x_stride, rows, q->inner, threads);
  int64_t groups = (q->outer + GROUP - 1) / GROUP;
  if (groups < threads) threads = (int)groups;
  if (groups * q->inner * rows < 20000 || threads < 1) threads = 1;
  parallel_spans(groups, threads, [&](int64_t first, int64_t last) { super_part(q, in, rows, out, out_stride, first, last); });
}

static void super_gemm(const PgQuant* q, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads) {
  if (q->type == PG_F32)
    super_product(q, (const float*)x, x_stride, rows, (float*)out, out_stride, threads);
  else
    super_product(q, (const bf16*)x, x_stride, rows, (bf16*)out, out_stride, threads);
}

}  // namespace PG_ISA
