// One vector type for the instruction set this unit is compiled for: W floats, by the compilers' vector extensions, so that
// the same source serves AVX-512, AVX2, SSE2 and NEON. Only dot products need intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PG_W 16
#include <immintrin.h>
#elif defined(__AVX2__)
#define PG_W 8
#include <immintrin.h>
#else
#define PG_W 4
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#define PG_ARM 1
#else
#define PG_ARM 0
#endif

// Products of bfloat16 pairs.
#if (PG_W == 16 && defined(__AVX512BF16__)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PG_DOT16 1
#else
#define PG_DOT16 0
#endif

// Products of four bytes: those of AVX-512, those of Arm (by unsigned bytes too).
#if PG_W == 16 && defined(__AVX512VNNI__)
#define PG_DOT8 1
#else
#define PG_DOT8 0
#endif
#if PG_ARM && defined(__ARM_FEATURE_DOTPROD)
#define PG_DOT_ARM 1
#else
#define PG_DOT_ARM 0
#endif
#if PG_ARM && defined(__ARM_FEATURE_MATMUL_INT8)
#define PG_DOT_UNSIGNED 1
#else
#define PG_DOT_UNSIGNED 0
#endif

#define PG_INLINE static inline __attribute__((always_inline))

namespace PG_ISA {

typedef uint16_t bf16;  // the bits

typedef float vf __attribute__((vector_size(PG_W * 4)));
typedef int32_t vi __attribute__((vector_size(PG_W * 4)));
typedef uint32_t vu __attribute__((vector_size(PG_W * 4)));
typedef uint16_t vh __attribute__((vector_size(PG_W * 2)));

constexpr int W = PG_W;

template <class V, class T>
PG_INLINE V load_as(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

PG_INLINE vf splat(float x) { return x - (vf){}; }
PG_INLINE vf load(const float* p) { return load_as<vf>(p); }
PG_INLINE vf load(const bf16* p) { return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16); }
PG_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

PG_INLINE void store(bf16* p, vf v) {
#if PG_DOT16 && PG_ARM
  bfloat16x4_t h = vcvt_bf16_f32((float32x4_t)v);
  memcpy(p, &h, sizeof h);
#elif PG_DOT16
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &h, sizeof h);
#else
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vu quiet = (bits >> 16) | 64;
  vu result = (vu)((vi)(bits & 0x7fffffff) > 0x7f800000) != 0 ? quiet : rounded;
  vh half = __builtin_convertvector(result, vh);
  memcpy(p, &half, sizeof half);
#endif
}

// One register for each address: compilers else compute, and store, one for every place that an unrolled loop reads.
template <class T, int R>
PG_INLINE void keep_addresses(const T* (&address)[R]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) asm("" : "+r"(address[r]));
}

PG_INLINE float to_float(float x) { return x; }
PG_INLINE float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
PG_INLINE void put(float* p, float x) { *p = x; }
PG_INLINE void put(bf16* p, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    *p = (bf16)(bits >> 16 | 64);
    return;
  }
#if PG_DOT16 && !PG_ARM
  // The vector instruction flushes denormals; a row's tail must not differ from its body.
  if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
#endif
  *p = (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The first n < W numbers; zeros follow.
template <class T>
PG_INLINE vf load_part(const T* p, int n) {
  T buffer[W] = {};
  for (int i = 0; i < n; i++) buffer[i] = p[i];
  return load(buffer);
}
template <class T>
PG_INLINE void store_part(T* p, vf v, int n) {
  T buffer[W];
  store(buffer, v);
  for (int i = 0; i < n; i++) p[i] = buffer[i];
}

PG_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
PG_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

PG_INLINE float sum(vf v) {
  float lanes[W];
  store(lanes, v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}
PG_INLINE float max(vf v) {
  float lanes[W];
  store(lanes, v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// e^x, relative error under 2^-22; 0 below −87.3, clamped above 88. What is no number stays so: vmin and vmax give their second then.
PG_INLINE vf exp(vf x) {
  vf clamped = vmin(splat(88.0f), vmax(splat(-87.3f), x));
  vf n = clamped * 1.44269504f + 12582912.0f;
  vi exponent = (vi)n - 0x4b400000;
  n = n - 12582912.0f;
  vf r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  vf scaled = (vf)((vi)y + (exponent << 23));
  return x < splat(-87.3f) ? splat(0.0f) : scaled;
}

PG_INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

// Near zero the quotient would lose digits: a short series serves there.
PG_INLINE vf tanh(vf x) {
  vf large = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  vf s = x * x;
  vf small = x + x * s * (-0.33333333f + s * (0.13333333f + s * (-0.053968254f + s * 0.021869488f)));
  vf magnitude = vmax(x, -x);
  return magnitude < splat(0.25f) ? small : large;
}

// erf by Abramowitz and Stegun 7.1.26 refined: absolute error under 2e-7.
PG_INLINE vf erf(vf x) {
  vf a = vmax(x, -x);
  vf t = 1.0f / (1.0f + 0.3275911f * a);
  vf poly = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  vf y = 1.0f - poly * exp(-a * a);
  return x < splat(0.0f) ? -y : y;
}

}  // namespace PG_ISA
