// Keys and values of pages as the products of attention want them: columns in groups of 32, an inner index or a pair of them at a time.
#pragma once

#include "microkernel.h"
#include "pointwise.h"

namespace PG_ISA {

PG_INLINE void assign(float* to, float from) { *to = from; }
PG_INLINE void assign(float* to, bf16 from) { *to = to_float(from); }
PG_INLINE void assign(bf16* to, bf16 from) { *to = from; }
PG_INLINE void assign(bf16* to, float from) { put(to, from); }

typedef int8_t vc __attribute__((vector_size(PG_W)));

// Numbers of a head as int8, and after them the scale of all, float32: x ≈ code · scale, the largest has code ±127.
template <class Q>
PG_INLINE void shrink(const Q* from, int64_t dim, int8_t* to) {
  vf top = {};
  for (int64_t d = 0; d < dim; d += W) {
    vf x = load_some(from + d, dim - d);
    top = vmax(top, vmax(x, -x));
  }
  float largest = max(top), scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
  for (int64_t d = 0; d < dim; d += W) {
    vf x = vmin(vmax(load_some(from + d, dim - d) * inverse, splat(-127.0f)), splat(127.0f));
    vc codes = __builtin_convertvector((vi)(x + 12582912.0f) - 0x4b400000, vc);  // rounds to the nearest
    memcpy(to + d, &codes, dim - d < W ? dim - d : W);
  }
  memcpy(to + dim, &scale, 4);
}

PG_INLINE void widen(const int8_t* from, int64_t dim, float* to) {
  float scale;
  memcpy(&scale, from + dim, 4);
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(to + d, __builtin_convertvector(load_as<vc>(from + d), vf) * scale);
  for (; d < dim; d++) to[d] = (float)from[d] * scale;
}

// Keys [count][dim] → groups of 32 keys, [dim / STEP][32][STEP].
template <class K, class T>
PG_INLINE void pack_keys_plain(const T* const* rows, int64_t count, int64_t dim, typename K::A* out) {
  for (int64_t j = 0; j < count; j++) {
    typename K::A* column = out + j / GROUP * GROUP * dim + j % GROUP * K::STEP;
    for (int64_t d = 0; d < dim; d += K::STEP)
      for (int p = 0; p < K::STEP; p++) assign(column + d * GROUP + p, rows[j][d + p]);
  }
}

#if PG_W == 16
// Sixteen vectors of sixteen words, rows become columns.
PG_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++)
    for (int h = 0; h < 2; h++) {
      t[h * 8 + i] = _mm512_shuffle_i32x4(r[h * 8 + i], r[h * 8 + 4 + i], 0x88);
      t[h * 8 + 4 + i] = _mm512_shuffle_i32x4(r[h * 8 + i], r[h * 8 + 4 + i], 0xdd);
    }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

// `words` 32-bit words of each of sixteen rows, a multiple of sixteen, to columns `ld` words apart. WIDEN: rows are bfloat16, words float32.
template <bool WIDEN>
PG_INLINE void pack_sixteen(const void* const* rows, int64_t words, uint32_t* out, int64_t ld) {
  for (int64_t w = 0; w < words; w += 16) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      r[i] = WIDEN ? (__m512i)load((const bf16*)rows[i] + w) : _mm512_loadu_si512((const uint32_t*)rows[i] + w);
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (w + i) * ld, r[i]);
  }
}
#endif

template <class K, class T>
static void pack_keys(const T* const* rows, int64_t count, int64_t dim, typename K::A* out) {
#if PG_W == 16
  constexpr bool widen = sizeof(T) == 2 && K::STEP == 1;
  int64_t words = dim / K::STEP;
  if ((sizeof(T) == sizeof(typename K::A) || widen) && words % 16 == 0) {
    for (int64_t j = 0; j < count; j += 16) {
      const void* sixteen[16];
      for (int i = 0; i < 16; i++) sixteen[i] = rows[j + i < count ? j + i : count - 1];
      uint32_t* column = (uint32_t*)(out + j / GROUP * GROUP * dim) + j % GROUP;
      pack_sixteen<widen>(sixteen, words, column, GROUP);
    }
    return;
  }
#endif
  pack_keys_plain<K>(rows, count, dim, out);
}

// Asks for rows [first, last) of `bytes` bytes each.
template <class T>
PG_INLINE void fetch(const T* const* rows, int64_t first, int64_t last, int64_t count, int64_t bytes) {
  for (int64_t j = first; j < last && j < count; j++)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)rows[j] + at);
}

// Values [count][v_dim] → groups of 32 columns, `ld` keys long, [ld / STEP][32][STEP]; up to `padded`, zeros where there is no key or no column.
template <class K, class T>
static void pack_values(const T* const* rows, int64_t count, int64_t padded, int64_t ld, int64_t v_dim, int64_t v_groups, typename K::A* out) {
  typedef typename K::A E;
  for (int64_t j = 0; j < padded; j += K::STEP)
    for (int64_t g = 0; g < v_groups; g++) {
      E* target = out + (g * ld + j) * GROUP;
      int64_t columns = v_dim - g * GROUP < GROUP ? v_dim - g * GROUP : GROUP;
#if PG_DOT16 && PG_W == 16
      if (K::STEP == 2 && sizeof(T) == 2 && columns == GROUP) {
        __m512i a = j < count ? _mm512_loadu_si512(rows[j] + g * GROUP) : _mm512_setzero_si512();
        __m512i b = j + 1 < count ? _mm512_loadu_si512(rows[j + 1] + g * GROUP) : _mm512_setzero_si512();
        __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        __m512i first = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
        __m512i second = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high);
        _mm512_storeu_si512(target, first);
        _mm512_storeu_si512(target + GROUP, second);
        continue;
      }
#endif
      if (K::STEP == 1 && columns == GROUP && j < count) {
        for (int64_t c = 0; c < GROUP; c += W) store((float*)target + c, load(rows[j] + g * GROUP + c));
        continue;
      }
      for (int64_t c = 0; c < GROUP; c++)
        for (int p = 0; p < K::STEP; p++) {
          bool there = j + p < count && c < columns;
          if (there)
            assign(target + c * K::STEP + p, rows[j + p][g * GROUP + c]);
          else
            target[c * K::STEP + p] = E(0);
        }
    }
}

}  // namespace PG_ISA
