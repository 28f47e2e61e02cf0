// Products with weights in blocks of 32 for the 8-bit dot products of Arm: signed by signed (DotProd), or codes as they are by signed (I8MM).
//
// As `quant.h` does it for AVX-512, of the same packed weights: inputs are 15-bit integers in two bytes, sums of a block are exact.
// Sixteen columns at a time, whose sums of two rows stay in registers.
#pragma once

namespace PG_ISA {

struct ArmInputs {
  int8_t *high, *low;  // [rows][inner]
  float *scale, *sum;  // [rows][blocks]
  int32_t* shift;      // [rows][blocks]
};

static ArmInputs carve_arm(int64_t rows, int64_t inner) {
  int64_t bytes = (rows * inner + 63) / 64 * 64, small = (rows * (inner / BLOCK) * 4 + 63) / 64 * 64;
  char* base = (char*)scratch<6>(2 * bytes + 3 * small);
  float* floats = (float*)(base + 2 * bytes);
  return ArmInputs{(int8_t*)base, (int8_t*)(base + bytes), floats, floats + small / 4, (int32_t*)(floats + small / 2)};
}

// Where codes are multiplied as signed bytes, those of 8 bits are less by this.
#if PG_DOT_UNSIGNED
constexpr int BIAS = 0;
#else
constexpr int BIAS = 128;
#endif

PG_INLINE int32x4_t dot_codes(int32x4_t sums, uint8x16_t codes, int8x16_t x) {
#if PG_DOT_UNSIGNED
  return vusdotq_s32(sums, codes, x);
#else
  return vdotq_s32(sums, vreinterpretq_s8_u8(codes), x);
#endif
}

template <class T>
PG_INLINE void arm_block(const T* x, int offset, const ArmInputs& in, int64_t at, int64_t block) {
  vf v[BLOCK / W], top = {};
  for (int i = 0; i < BLOCK / W; i++) v[i] = load(x + i * W), top = vmax(top, vmax(v[i], -v[i]));
  float largest = max(top), inverse = largest > 0 ? 16256.0f / largest : 0.0f;
  int32x4_t total = vdupq_n_s32(0);
  for (int i = 0; i < BLOCK / W; i++) {
    int32x4_t whole = vcvtnq_s32_f32((float32x4_t)(v[i] * inverse)), high = vrshrq_n_s32(whole, 7);
    int32x4_t low = vsubq_s32(whole, vshlq_n_s32(high, 7));
    int32_t lanes[2][4];
    vst1q_s32(lanes[0], high), vst1q_s32(lanes[1], low);
    for (int k = 0; k < W; k++) in.high[at + i * W + k] = (int8_t)lanes[0][k], in.low[at + i * W + k] = (int8_t)lanes[1][k];
    total = vaddq_s32(total, whole);
  }
  int32_t sum = vaddvq_s32(total);
  in.scale[block] = largest / 16256.0f;
  in.shift[block] = offset * sum;
  in.sum[block] = in.scale[block] * (float)sum;
}

PG_INLINE vf halves(const uint8_t* p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

PG_INLINE int8x16_t arm_quad(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}

// Sums of R rows and the sixteen columns of one half of a group, into c[R][32].
template <int BITS, bool MIN, int R>
static void arm_tile(const ArmInputs& in, int64_t inner, const uint8_t* w, int half, float* c) {
  constexpr int HALF = BITS == 4 ? 256 : 512, SIZE = 2 * HALF + 64 + (MIN ? 64 : 0), N = 4;
  int64_t blocks = inner / BLOCK;
  vf acc[R][N] = {};
  for (int64_t b = 0; b < blocks; b++, w += SIZE) {
    const uint8_t* codes = w + half * HALF;
    int32x4_t dot[R][N];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) dot[r][n] = vdupq_n_s32(0);
    for (int part = 0; part < 2; part++) {
      const int8_t* x = (part ? in.low : in.high) + b * BLOCK;
#pragma GCC unroll 8
      for (int j = 0; j < BITS; j++)
        for (int n = 0; n < N; n++) {
          uint8x16_t v = vld1q_u8(codes + j * 64 + n * 16);
          if (BITS == 8) {
            if (BIAS) v = veorq_u8(v, vdupq_n_u8(128));
            for (int r = 0; r < R; r++) dot[r][n] = dot_codes(dot[r][n], v, arm_quad(x + r * inner + 4 * j));
          } else {
            for (int r = 0; r < R; r++) {
              dot[r][n] = dot_codes(dot[r][n], vandq_u8(v, vdupq_n_u8(15)), arm_quad(x + r * inner + 8 * j));
              dot[r][n] = dot_codes(dot[r][n], vshrq_n_u8(v, 4), arm_quad(x + r * inner + 8 * j + 4));
            }
          }
        }
      for (int r = 0; part == 0 && r < R; r++)
        for (int n = 0; n < N; n++) dot[r][n] = vshlq_n_s32(dot[r][n], 7);
    }
    const uint8_t* tail = w + 2 * HALF + half * 32;
    for (int n = 0; n < N; n++) {
      vf scale = halves(tail + n * 8), minimum = MIN ? halves(tail + 64 + n * 8) : vf{};
      for (int r = 0; r < R; r++) {
        int64_t at = r * blocks + b;
        vf number = (vf)vcvtq_f32_s32(vsubq_s32(dot[r][n], vdupq_n_s32(in.shift[at])));
        acc[r][n] += number * scale * in.scale[at];
        if (MIN) acc[r][n] += minimum * in.sum[at];
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) store(c + r * GROUP + half * 16 + n * W, acc[r][n]);
}

template <class T, int BITS, bool MIN>
static void arm_rows(const PgQuant* q, const ArmInputs& all, int64_t rows, T* out, int64_t ldo, int64_t first, int64_t last) {
  int64_t inner = q->inner, blocks = inner / BLOCK, size = FORMATS[q->kind].block_bytes();
  alignas(64) float c[2 * GROUP];
  for (int64_t g = first; g < last; g++) {
    const uint8_t* w = (const uint8_t*)q->weight + g * blocks * size;
    for (int64_t m = 0; m < rows; m += 2) {
      ArmInputs in{all.high + m * inner, all.low + m * inner, all.scale + m * blocks, all.sum + m * blocks, all.shift + m * blocks};
      int64_t count = rows - m < 2 ? 1 : 2;
      for (int half = 0; half < 2; half++)
        count == 2 ? arm_tile<BITS, MIN, 2>(in, inner, w, half, c) : arm_tile<BITS, MIN, 1>(in, inner, w, half, c);
      emit(q->bias, q->outer, count, g * GROUP, GROUP, c, GROUP, out + m * ldo, ldo);
    }
  }
}

template <class T>
static void arm_product(const PgQuant* q, const T* x, int64_t x_stride, int64_t rows, T* out, int64_t out_stride, int threads) {
  const Format& f = FORMATS[q->kind];
  int64_t inner = q->inner, blocks = inner / BLOCK, groups = (q->outer + GROUP - 1) / GROUP;
  ArmInputs in = carve_arm(rows, inner);
  int offset = f.offset - (f.bits == 8 ? BIAS : 0);
  for_rows(rows, team(rows, inner * 4, threads), [=](int64_t r) {
    for (int64_t b = 0; b < blocks; b++) arm_block(x + r * x_stride + b * BLOCK, offset, in, r * inner + b * BLOCK, r * blocks + b);
  });
  auto part = f.bits == 4 ? (f.minimum ? arm_rows<T, 4, true> : arm_rows<T, 4, false>)
                          : (f.minimum ? arm_rows<T, 8, true> : arm_rows<T, 8, false>);
  if (groups * inner * rows < 20000) threads = 1;
  parallel_spans(groups, threads, [&](int64_t first, int64_t last) { part(q, in, rows, out, out_stride, first, last); });
}

static void quant_gemm(const PgQuant* q, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads) {
  if (q->kind >= FIRST_SUPER) return super_gemm(q, x, x_stride, rows, out, out_stride, threads);
  if (q->type == PG_F32)
    arm_product(q, (const float*)x, x_stride, rows, (float*)out, out_stride, threads);
  else
    arm_product(q, (const bf16*)x, x_stride, rows, (bf16*)out, out_stride, threads);
}

}  // namespace PG_ISA
