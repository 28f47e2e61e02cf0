// The product at the bottom of everything: a few rows times one or two groups of 32 columns, all partial sums in registers.
//
// Each result is one chain of sums in ascending order of the inner index, whatever the number of rows or where the inner
// dimension was cut: results do not depend on the batch.
#pragma once

#include "simd.h"

namespace PG_ISA {

constexpr int GROUP = 32;              // columns of a group
constexpr int PARTS = GROUP / W;       // vectors of a group
constexpr int MAX_ROWS = W == 16 ? 6 : W == 8 || PG_ARM ? 3 : 1;  // as many as the registers hold
constexpr int MAX_GROUPS = W == 16 ? 2 : 1;

// How an element of the left side meets the right side.
struct F32 {
  typedef float A;
  typedef float B;
  static constexpr int STEP = 1;  // inner indices a step
  template <int R, int N>
  PG_INLINE void step(vf (&acc)[R][N], const float* a, int64_t lda, const float* b, int64_t group) {
    for (int n = 0; n < N; n++) {
      vf w = load(b + (n / PARTS) * group + (n % PARTS) * W);
      for (int r = 0; r < R; r++) acc[r][n] += w * a[r * lda];
    }
  }
};

// bfloat16 weights widened on the way; the left side is float32.
struct Wide16 {
  typedef float A;
  typedef bf16 B;
  static constexpr int STEP = 2;
  template <int R, int N>
  PG_INLINE void step(vf (&acc)[R][N], const float* a, int64_t lda, const bf16* b, int64_t group) {
    for (int n = 0; n < N; n++) {
      vu pair = load_as<vu>(b + (n / PARTS) * group + (n % PARTS) * W * 2);
      vf even = (vf)(pair << 16), odd = (vf)(pair & 0xffff0000u);
      for (int r = 0; r < R; r++) {
        acc[r][n] += even * a[r * lda];
        acc[r][n] += odd * a[r * lda + 1];
      }
    }
  }
};

#if PG_DOT16 && PG_ARM
struct Dot16 {
  typedef bf16 A;
  typedef bf16 B;
  static constexpr int STEP = 2;
  template <int R, int N>
  PG_INLINE void step(vf (&acc)[R][N], const bf16* a, int64_t lda, const bf16* b, int64_t group) {
    for (int n = 0; n < N; n++) {
      bfloat16x8_t w = load_as<bfloat16x8_t>(b + (n / PARTS) * group + (n % PARTS) * W * 2);
      for (int r = 0; r < R; r++) {
        bfloat16x8_t x = vreinterpretq_bf16_u32(vdupq_n_u32(load_as<uint32_t>(a + r * lda)));
        acc[r][n] = (vf)vbfdotq_f32((float32x4_t)acc[r][n], w, x);
      }
    }
  }
};
typedef Dot16 Best16;
#elif PG_DOT16
struct Dot16 {
  typedef bf16 A;
  typedef bf16 B;
  static constexpr int STEP = 2;
  template <int R, int N>
  PG_INLINE void step(vf (&acc)[R][N], const bf16* a, int64_t lda, const bf16* b, int64_t group) {
    __m512bh w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) w[n] = (__m512bh)_mm512_loadu_si512(b + (n / PARTS) * group + (n % PARTS) * W * 2);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, a + r * lda, 4);
      __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) acc[r][n] = (vf)_mm512_dpbf16_ps((__m512)acc[r][n], x, w[n]);
    }
  }
};
typedef Dot16 Best16;
#else
typedef Wide16 Best16;
#endif

// What a tile fetches beside its work: of every two lines that it reads those in `LINES` (bits), `bytes` ahead.
template <int LINES>
struct Fetch {
  int64_t bytes;
  template <class B, int GROUPS>
  PG_INLINE void step(const Fetch& mine, const B* b, int64_t group) {
    for (int g = 0; g < GROUPS; g++)
      for (int line = 0; line < 2; line++)
        if (LINES >> line & 1) __builtin_prefetch((const char*)(b + g * group) + mine.bytes + line * 64, 0, LINES == 3 ? 3 : 2);
  }
};

// c[R][GROUPS · 32] (+)= a[R][inner] · b. `group`: elements between the groups of b.
template <class K, int R, int GROUPS, class F>
static void tile(const typename K::A* a, int64_t lda, const typename K::B* b, int64_t group, int64_t inner, float* c, int64_t ldc, bool add,
                 F fetch) {
  constexpr int N = GROUPS * PARTS;
  vf acc[R][N];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) acc[r][n] = add ? load(c + r * ldc + n * W) : vf{};
  for (int64_t i = 0; i < inner; i += K::STEP) {
    F::template step<typename K::B, GROUPS>(fetch, b, group);
    K::template step<R, N>(acc, a, lda, b, group);
    a += K::STEP;
    b += K::STEP * GROUP;
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(c + r * ldc + n * W, acc[r][n]);
}

template <class K, int GROUPS, class F>
PG_INLINE void tile_rows(int rows, const typename K::A* a, int64_t lda, const typename K::B* b, int64_t group, int64_t inner, float* c,
                         int64_t ldc, bool add, F fetch) {
  if (rows == 1) return tile<K, 1, GROUPS>(a, lda, b, group, inner, c, ldc, add, fetch);
  if constexpr (MAX_ROWS >= 2)
    if (rows == 2) return tile<K, 2, GROUPS>(a, lda, b, group, inner, c, ldc, add, fetch);
  if constexpr (MAX_ROWS >= 3)
    if (rows == 3) return tile<K, 3, GROUPS>(a, lda, b, group, inner, c, ldc, add, fetch);
  if constexpr (MAX_ROWS >= 6) {
    if (rows == 4) return tile<K, 4, GROUPS>(a, lda, b, group, inner, c, ldc, add, fetch);
    if (rows == 5) return tile<K, 5, GROUPS>(a, lda, b, group, inner, c, ldc, add, fetch);
    return tile<K, 6, GROUPS>(a, lda, b, group, inner, c, ldc, add, fetch);
  }
}

// Tiles of one or two groups of columns, each with what it fetches: `fetch(block, blocks, body)` calls `body` with it.
template <class K, int GROUPS, class F>
PG_INLINE void tile_blocks(int64_t rows, const typename K::A* a, int64_t lda, const typename K::B* b, int64_t group, int64_t inner, float* c,
                           int64_t ldc, bool add, F fetch) {
  int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int64_t block = 0; block < blocks; block++) {
    int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
    fetch(block, blocks, [&](auto what) {
      tile_rows<K, GROUPS>((int)count, a + first * lda, lda, b, group, inner, c + first * ldc, ldc, add, what);
    });
  }
}

// c[rows][groups · 32] (+)= a · b for any number of rows and groups, in tiles.
template <class K>
static void multiply(int64_t rows, int64_t groups, const typename K::A* a, int64_t lda, const typename K::B* b, int64_t group, int64_t inner,
                     float* c, int64_t ldc, bool add) {
  auto nothing = [](int64_t, int64_t, auto body) { body(Fetch<0>{0}); };
  for (int64_t g = 0; g < groups; g += MAX_GROUPS)
    if (MAX_GROUPS == 2 && g + 1 < groups)
      tile_blocks<K, MAX_GROUPS>(rows, a, lda, b + g * group, group, inner, c + g * GROUP, ldc, add, nothing);
    else
      tile_blocks<K, 1>(rows, a, lda, b + g * group, group, inner, c + g * GROUP, ldc, add, nothing);
}

// The same for up to `MAX_GROUPS` groups that come from memory, `ahead` bytes before those that come next: memory shall not rest while the
// rows behind the first ones are multiplied.
template <class K>
static void multiply_few(int64_t rows, int64_t groups, const typename K::A* a, int64_t lda, const typename K::B* b, int64_t group, int64_t inner,
                         float* c, int64_t ldc, bool add, int64_t ahead) {
  auto fetch = [=](int64_t block, int64_t blocks, auto body) {
    if (blocks == 1) return body(Fetch<3>{2048});
    if (block == 0) return body(Fetch<1>{ahead});
    if (block == 1) return body(Fetch<2>{ahead});
    body(Fetch<0>{0});
  };
  if (MAX_GROUPS == 2 && groups == 2)
    tile_blocks<K, MAX_GROUPS>(rows, a, lda, b, group, inner, c, ldc, add, fetch);
  else
    tile_blocks<K, 1>(rows, a, lda, b, group, inner, c, ldc, add, fetch);
}

}  // namespace PG_ISA
