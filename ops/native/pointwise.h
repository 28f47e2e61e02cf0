// Kernels that touch each number once: norms, activations, rotation, argmax, and the exponentials of sampling.
#pragma once

#include <cmath>

#include "api.h"
#include "pool.h"
#include "simd.h"

namespace PG_ISA {

constexpr int64_t WORTH_A_TEAM = 32768;  // numbers below which waking threads costs more than the work

PG_INLINE int team(int64_t rows, int64_t width, int threads) {
  int64_t wanted = rows * width / WORTH_A_TEAM;
  if (wanted > rows) wanted = rows;
  return wanted < threads ? (wanted > 1 ? (int)wanted : 1) : threads;
}

template <class F>
PG_INLINE void for_rows(int64_t rows, int threads, F body) {
  parallel_spans(rows, threads, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) body(r);
  });
}

template <class T>
PG_INLINE vf load_some(const T* p, int64_t left) {
  return left >= W ? load(p) : load_part(p, (int)left);
}
template <class T>
PG_INLINE void store_some(T* p, vf v, int64_t left) {
  if (left >= W)
    store(p, v);
  else
    store_part(p, v, (int)left);
}

template <class T>
static void rms_norm_of(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride, const T* weight, float offset, float eps,
                        int64_t rows, int64_t width, T* out, T* total, int threads) {
  for_rows(rows, team(rows, width, threads), [=](int64_t r) {
    const T* in = x + r * x_stride;
    if (residual) {
      T* sums = total + r * width;
      for (int64_t i = 0; i < width; i += W)
        store_some(sums + i, load_some(in + i, width - i) + load_some(residual + r * residual_stride + i, width - i), width - i);
      in = sums;
    }
    vf squares = {};
    for (int64_t i = 0; i < width; i += W) {
      vf v = load_some(in + i, width - i);
      squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += W) {
      vf v = load_some(in + i, width - i) * scale;
      if (weight) v = v * (load_some(weight + i, width - i) + offset);
      store_some(out + r * width + i, v, width - i);
    }
  });
}

static void rms_norm(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride, const void* weight, float offset, float eps,
                     int type, int64_t rows, int64_t width, void* out, void* total, int threads) {
  if (type == PG_BF16)
    rms_norm_of((const bf16*)x, x_stride, (const bf16*)residual, residual_stride, (const bf16*)weight, offset, eps, rows, width, (bf16*)out,
                (bf16*)total, threads);
  else
    rms_norm_of((const float*)x, x_stride, (const float*)residual, residual_stride, (const float*)weight, offset, eps, rows, width,
                (float*)out, (float*)total, threads);
}

enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, QUICK_GELU, SIGMOID, TANH, ALPHA };

template <int KIND>
PG_INLINE vf activate(vf x, float alpha) {
  if constexpr (KIND == SILU) return x * sigmoid(x);
  if constexpr (KIND == GELU) return 0.5f * x * (1.0f + erf(x * 0.70710678f));
  if constexpr (KIND == GELU_TANH) return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
  if constexpr (KIND == RELU) return vmax(x, vf{});
  if constexpr (KIND == RELU2) return vmax(x, vf{}) * vmax(x, vf{});
  if constexpr (KIND == QUICK_GELU) return x * sigmoid(1.702f * x);
  if constexpr (KIND == SIGMOID) return sigmoid(x);
  if constexpr (KIND == TANH) return tanh(x);
  if constexpr (KIND == ALPHA) return x * sigmoid(alpha * x);
}

template <class T, int KIND>
static void gated_norm_of(const T* x, int64_t x_stride, const T* gate, int64_t gate_stride, const T* weight, int64_t weight_step, float eps,
                          int gate_first, int64_t rows, int64_t groups, int64_t width, T* out, int threads) {
  for_rows(rows * groups, team(rows * groups, width * 4, threads), [=](int64_t part) {
    int64_t r = part / groups, g = part % groups;
    const T *in = x + r * x_stride + g * width, *by = gate + r * gate_stride + g * width, *scales = weight + g * weight_step;
    vf squares = {};
    for (int64_t i = 0; i < width; i += W) {
      vf v = load_some(in + i, width - i);
      if (gate_first) v = v * activate<KIND>(load_some(by + i, width - i), 0.0f);
      squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += W) {
      vf v = load_some(in + i, width - i) * activate<KIND>(load_some(by + i, width - i), 0.0f);
      store_some(out + part * width + i, v * scale * load_some(scales + i, width - i), width - i);
    }
  });
}

template <class T>
static void gated_norm_as(int silu, const T* x, int64_t x_stride, const T* gate, int64_t gate_stride, const T* weight, int64_t weight_step,
                          float eps, int gate_first, int64_t rows, int64_t groups, int64_t width, T* out, int threads) {
  auto run = silu ? gated_norm_of<T, SILU> : gated_norm_of<T, SIGMOID>;
  run(x, x_stride, gate, gate_stride, weight, weight_step, eps, gate_first, rows, groups, width, out, threads);
}

static void gated_norm(const void* x, int64_t x_stride, const void* gate, int64_t gate_stride, const void* weight, int64_t weight_step, float eps,
                       int type, int silu, int gate_first, int64_t rows, int64_t groups, int64_t width, void* out, int threads) {
  if (type == PG_BF16)
    gated_norm_as(silu, (const bf16*)x, x_stride, (const bf16*)gate, gate_stride, (const bf16*)weight, weight_step, eps, gate_first, rows,
                  groups, width, (bf16*)out, threads);
  else
    gated_norm_as(silu, (const float*)x, x_stride, (const float*)gate, gate_stride, (const float*)weight, weight_step, eps, gate_first, rows,
                  groups, width, (float*)out, threads);
}

// out = act(x), or act(first half) · (second half + shift) where `gated`.
template <class T, int KIND>
static void activate_rows(const T* x, int64_t x_stride, int gated, float limit, float alpha, float shift, int64_t rows, int64_t width, T* out,
                          int threads) {
  for_rows(rows, team(rows, width * 4, threads), [=](int64_t r) {
    const T* gate = x + r * x_stride;
    for (int64_t i = 0; i < width; i += W) {
      vf g = load_some(gate + i, width - i), u = gated ? load_some(gate + width + i, width - i) : splat(1.0f);
      if (limit > 0) {
        g = vmin(g, splat(limit));
        u = vmin(vmax(u, splat(-limit)), splat(limit));
      }
      vf y = activate<KIND>(g, alpha);
      store_some(out + r * width + i, gated ? y * (u + shift) : y, width - i);
    }
  });
}

template <class T>
static void activate_kind(int kind, const T* x, int64_t x_stride, int gated, float limit, float alpha, float shift, int64_t rows, int64_t width,
                          T* out, int threads) {
  constexpr decltype(&activate_rows<T, SILU>) kinds[] = {
      activate_rows<T, SILU>,       activate_rows<T, GELU>,    activate_rows<T, GELU_TANH>, activate_rows<T, RELU>,  activate_rows<T, RELU2>,
      activate_rows<T, QUICK_GELU>, activate_rows<T, SIGMOID>, activate_rows<T, TANH>,      activate_rows<T, ALPHA>,
  };
  kinds[kind](x, x_stride, gated, limit, alpha, shift, rows, width, out, threads);
}

static void activation(const void* x, int64_t x_stride, int type, int kind, int gated, float limit, float alpha, float shift, int64_t rows,
                       int64_t width, void* out, int threads) {
  if (type == PG_BF16)
    activate_kind(kind, (const bf16*)x, x_stride, gated, limit, alpha, shift, rows, width, (bf16*)out, threads);
  else
    activate_kind(kind, (const float*)x, x_stride, gated, limit, alpha, shift, rows, width, (float*)out, threads);
}

template <class T>
PG_INLINE void rotate_neox(T* head, int64_t half, const float* cos, const float* sin) {
  for (int64_t i = 0; i < half; i += W) {
    vf a = load_some(head + i, half - i), b = load_some(head + half + i, half - i);
    vf c = load_some(cos + i, half - i), s = load_some(sin + i, half - i);
    store_some(head + i, a * c - b * s, half - i);
    store_some(head + half + i, b * c + a * s, half - i);
  }
}

template <class T>
PG_INLINE void rotate_interleaved(T* head, int64_t half, const float* cos, const float* sin) {
  for (int64_t i = 0; i < half; i++) {
    float a = to_float(head[2 * i]), b = to_float(head[2 * i + 1]);
    put(head + 2 * i, a * cos[i] - b * sin[i]);
    put(head + 2 * i + 1, b * cos[i] + a * sin[i]);
  }
}

template <class T>
static void rope_of(T* x, int64_t token_stride, int64_t head_stride, int64_t tokens, int64_t heads, int64_t rotary, int interleaved,
                    const float* cos, const float* sin, int64_t angles, int threads) {
  int64_t half = rotary / 2;
  for_rows(tokens, team(tokens, heads * rotary, threads), [=](int64_t t) {
    for (int64_t h = 0; h < heads; h++) {
      T* head = x + t * token_stride + h * head_stride;
      if (interleaved)
        rotate_interleaved(head, half, cos + t * angles, sin + t * angles);
      else
        rotate_neox(head, half, cos + t * angles, sin + t * angles);
    }
  });
}

static void rope(void* x, int type, int64_t token_stride, int64_t head_stride, int64_t tokens, int64_t heads, int64_t rotary, int interleaved,
                 const float* cos, const float* sin, int64_t angles, int threads) {
  if (type == PG_BF16)
    rope_of((bf16*)x, token_stride, head_stride, tokens, heads, rotary, interleaved, cos, sin, angles, threads);
  else
    rope_of((float*)x, token_stride, head_stride, tokens, heads, rotary, interleaved, cos, sin, angles, threads);
}

PG_INLINE bool any(vi found) { return sum(found != 0 ? splat(1.0f) : vf{}) > 0; }

// The largest number, NaN left out.
template <class T>
PG_INLINE float row_max(const T* x, int64_t width, bool* bad) {
  vf top[2] = {splat(-INFINITY), splat(-INFINITY)};
  vi strange = {};
  int64_t i = 0;
  for (; i + 2 * W <= width; i += 2 * W)
    for (int k = 0; k < 2; k++) {
      vf v = load(x + i + k * W);
      top[k] = vmax(v, top[k]);
      strange |= v != v;
    }
  float best = max(vmax(top[0], top[1]));
  bool nan = any(strange);
  for (; i < width; i++) {
    float v = to_float(x[i]);
    best = v > best ? v : best;
    nan |= v != v;
  }
  *bad = nan;
  return best;
}

template <class T>
PG_INLINE int64_t first_of(const T* x, int64_t width, float wanted) {
  int64_t i = 0;
  for (; i + 16 * W <= width; i += 16 * W) {
    vi found = {};
    for (int k = 0; k < 16; k++) found |= load(x + i + k * W) == splat(wanted);
    if (any(found)) break;
  }
  while (i < width && to_float(x[i]) != wanted) i++;
  return i < width ? i : 0;
}

// Which of the W columns from the `first` one of a word's 32 on a mask allows.
PG_INLINE vi allowed(uint32_t word, int first) {
  alignas(64) static constexpr uint32_t LANES[16] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return ((load_as<vu>(LANES) << (uint32_t)first) & ((vu){} + word)) != 0;
}
PG_INLINE bool allowed(const int32_t* mask, int64_t i) { return (uint32_t)mask[i / 32] >> (i & 31) & 1; }

// The largest of the columns that a mask allows; words that allow none are not looked at.
template <class T>
PG_INLINE float allowed_max(const T* x, int64_t width, const int32_t* mask, bool* bad) {
  vf top[2] = {splat(-INFINITY), splat(-INFINITY)};
  vi strange = {};
  const int64_t whole = width / 32;
  for (int64_t w = 0; w < whole; w++) {
    uint32_t word = (uint32_t)mask[w];
    if (!word) continue;
    for (int k = 0; k < 32 / W; k++) {
      vf v = allowed(word, k * W) ? load(x + 32 * w + k * W) : splat(-INFINITY);
      top[k & 1] = vmax(v, top[k & 1]);
      strange |= v != v;
    }
  }
  float best = max(vmax(top[0], top[1]));
  bool nan = any(strange);
  for (int64_t i = 32 * whole; i < width; i++) {
    if (!allowed(mask, i)) continue;
    float v = to_float(x[i]);
    best = v > best ? v : best;
    nan |= v != v;
  }
  *bad = nan;
  return best;
}

template <class T>
PG_INLINE int64_t first_allowed(const T* x, int64_t width, const int32_t* mask, float wanted) {
  const int64_t whole = width / 32;
  int64_t w = 0;
  if (wanted == -INFINITY) return 0;
  for (; w < whole; w += 8) {
    vi found = {};
    for (int64_t u = w; u < w + 8 && u < whole; u++) {
      uint32_t word = (uint32_t)mask[u];
      if (!word) continue;
      for (int k = 0; k < 32 / W; k++) found |= allowed(word, k * W) & (load(x + 32 * u + k * W) == splat(wanted));
    }
    if (any(found)) break;
  }
  for (int64_t i = 32 * (w < whole ? w : whole); i < width; i++)
    if (allowed(mask, i) && to_float(x[i]) == wanted) return i;
  return 0;
}

// The first index of the largest number; 0 where nothing is above −∞.
template <class T>
static void argmax_of(const T* x, int64_t stride, int64_t rows, int64_t width, const int32_t* mask, int64_t* out, bool* bad, int threads) {
  const int64_t words = (width + 31) / 32;
  for_rows(rows, team(rows, width, threads), [=](int64_t r) {
    const T* row = x + r * stride;
    if (mask) {
      const int32_t* mine = mask + r * words;
      out[r] = first_allowed(row, width, mine, allowed_max(row, width, mine, bad + r));
    } else
      out[r] = first_of(row, width, row_max(row, width, bad + r));
  });
}

static void argmax(const void* x, int64_t stride, int type, int64_t rows, int64_t width, const int32_t* mask, int64_t* out, bool* bad,
                   int threads) {
  if (type == PG_BF16)
    argmax_of((const bf16*)x, stride, rows, width, mask, out, bad, threads);
  else
    argmax_of((const float*)x, stride, rows, width, mask, out, bad, threads);
}

template <class T>
static void bitmask_of(T* x, int64_t stride, int64_t rows, int64_t width, const int32_t* mask, int threads) {
  T refused;
  put(&refused, -INFINITY);
  const int64_t words = (width + 31) / 32;
  for_rows(rows, team(rows, width, threads), [=](int64_t r) {
    T* row = x + r * stride;
    for (int64_t w = 0; w < words; w++) {
      uint32_t bits = (uint32_t)mask[r * words + w];
      int64_t end = 32 * w + 32 < width ? 32 * w + 32 : width;
      if (bits == 0xFFFFFFFFu) continue;
      for (int64_t i = 32 * w; i < end; i++, bits >>= 1) row[i] = bits & 1 ? row[i] : refused;
    }
  });
}

static void bitmask(void* x, int64_t stride, int type, int64_t rows, int64_t width, const int32_t* mask, int threads) {
  if (type == PG_BF16)
    bitmask_of((bf16*)x, stride, rows, width, mask, threads);
  else
    bitmask_of((float*)x, stride, rows, width, mask, threads);
}

template <class T>
static double exp_row_of(const T* x, int64_t width, const int32_t* mask, float top, float factor, float* weights) {
  double total = 0;
  for (int64_t block = 0; block < width; block += 1024) {
    int64_t end = block + 1024 < width ? block + 1024 : width;
    vf part = {};
    for (int64_t i = block; i < end; i += W) {
      vf v = load_some(x + i, end - i);
      if (mask) v = allowed((uint32_t)mask[i / 32], (int)(i & 31)) ? v : splat(-INFINITY);
      vf w = exp((v - top) * factor);
      store_some(weights + i, w, end - i);
      if (end - i < W) w = load_part(weights + i, (int)(end - i));
      part += w;
    }
    total += sum(part);
  }
  return total;
}

static double exp_row(const void* x, int type, int64_t width, const int32_t* mask, float top, float factor, float* weights) {
  return type == PG_BF16 ? exp_row_of((const bf16*)x, width, mask, top, factor, weights)
                         : exp_row_of((const float*)x, width, mask, top, factor, weights);
}

}  // namespace PG_ISA
