// What each row's adapter adds to a linear layer's outputs: x times its down factors, times its up factors.
#pragma once

#include "api.h"
#include "pointwise.h"
#include "pool.h"
#include "scratch.h"

namespace PG_ISA {

constexpr int LORA_ROWS = 4;                 // of one adapter that share each factor that is loaded
constexpr int64_t LORA_RANKS = 8;            // columns of the first product that a thread takes at a time
constexpr int64_t LORA_COLUMNS = 4 * 2 * W;  // of the second

// Up to LORA_ROWS rows of one adapter.
struct LoraTile {
  int32_t slot, count;
  int32_t row[LORA_ROWS];
};

// Rows with an adapter by adapter, in tiles; their number is returned.
static int64_t lora_tiles(const int32_t* slots, int64_t rows, int64_t adapters, int32_t* first, LoraTile* tiles) {
  for (int64_t s = 0; s < adapters; s++) first[s] = -1;
  int64_t count = 0;
  for (int64_t r = 0; r < rows; r++) {
    int32_t slot = slots[r];
    if (slot < 0) continue;
    // The adapter's open tile, which takes the row if it has room.
    int32_t open = first[slot];
    if (open < 0 || tiles[open].count == LORA_ROWS) {
      open = first[slot] = (int32_t)count++;
      tiles[open] = LoraTile{slot, 0, {}};
    }
    tiles[open].row[tiles[open].count++] = (int32_t)r;
  }
  return count;
}

// low[r][n] = x[r] · down[n] for some n, each sum by itself: whoever else is in the tile changes no bits.
template <class T, int R>
static void lora_down(const PgLora* a, const T* x, int64_t x_stride, const T* down, const LoraTile& tile, int64_t first, int64_t last, float* low,
                      int64_t width) {
  const T* left[R];
  for (int r = 0; r < R; r++) left[r] = x + tile.row[r] * x_stride;
  const T* right = down + tile.slot * width * a->inner;
  int64_t whole = a->inner / W * W;
  int rest = (int)(a->inner - whole);
  for (int64_t n = first; n < last; n += 2) {
    const T *one = right + n * a->inner, *two = n + 1 < last ? one + a->inner : one;
    vf sums[R][2] = {};
    for (int64_t k = 0; k < whole; k += W) {
      vf b = load(one + k), c = load(two + k);
      for (int r = 0; r < R; r++) {
        vf v = load(left[r] + k);
        sums[r][0] += v * b;
        sums[r][1] += v * c;
      }
    }
    if (rest) {
      vf b = load_part(one + whole, rest), c = load_part(two + whole, rest);
      for (int r = 0; r < R; r++) {
        vf v = load_part(left[r] + whole, rest);
        sums[r][0] += v * b;
        sums[r][1] += v * c;
      }
    }
    for (int r = 0; r < R; r++) {
      low[tile.row[r] * width + n] = sum(sums[r][0]);
      if (n + 1 < last) low[tile.row[r] * width + n + 1] = sum(sums[r][1]);
    }
  }
}

// out[r][c] += Σ low[r][k] · up[k][c] over a part's ranks, for its columns [first, last).
template <class T, int R>
static void lora_up(const PgLora* a, const T* up, const LoraTile& tile, int64_t first, int64_t last, const float* low, int64_t width, T* out) {
  const T* factors = up + tile.slot * a->rank * a->outer;
  for (int64_t c = first; c < last; c += 2 * W) {
    int64_t left = last - c, beyond = left - W;
    vf sums[R][2] = {};
    for (int64_t k = 0; k < a->rank; k++) {
      const T* row = factors + k * a->outer + c;
      vf one = load_some(row, left), two = beyond > 0 ? load_some(row + W, beyond) : vf{};
      for (int r = 0; r < R; r++) {
        float scale = low[tile.row[r] * width + k];
        sums[r][0] += scale * one;
        sums[r][1] += scale * two;
      }
    }
    for (int r = 0; r < R; r++) {
      T* target = out + tile.row[r] * a->outer + c;
      store_some(target, load_some(target, left) + sums[r][0], left);
      if (beyond > 0) store_some(target + W, load_some(target + W, beyond) + sums[r][1], beyond);
    }
  }
}

template <class T, int R = LORA_ROWS>
static void lora_columns(const PgLora* a, const T* up, const LoraTile& tile, int64_t first, int64_t last, const float* low, int64_t width,
                         T* out) {
  if constexpr (R > 1)
    if (tile.count < R) return lora_columns<T, R - 1>(a, up, tile, first, last, low, width, out);
  int64_t begin = 0;
  for (int64_t part = 0; part < a->parts; begin += a->columns[part++]) {
    int64_t end = begin + a->columns[part], from = first > begin ? first : begin, to = last < end ? last : end;
    if (from < to) lora_up<T, R>(a, up, tile, from, to, low + part * a->rank, width, out);
  }
}

template <class T, int R = LORA_ROWS>
static void lora_ranks(const PgLora* a, const T* x, int64_t x_stride, const T* down, const LoraTile& tile, int64_t first, int64_t last, float* low,
                       int64_t width) {
  if constexpr (R > 1)
    if (tile.count < R) return lora_ranks<T, R - 1>(a, x, x_stride, down, tile, first, last, low, width);
  lora_down<T, R>(a, x, x_stride, down, tile, first, last, low, width);
}

template <class T>
static void lora_of(const PgLora* a, const T* x, int64_t x_stride, const T* down, const T* up, const int32_t* slots, int64_t rows, T* out,
                    int threads) {
  int64_t width = a->rank * a->parts;
  size_t tile_bytes = rows * sizeof(LoraTile), low_bytes = rows * width * sizeof(float);
  char* memory = (char*)scratch<14>(tile_bytes + low_bytes + a->slots * sizeof(int32_t));
  LoraTile* tiles = (LoraTile*)memory;
  float* low = (float*)(memory + tile_bytes);
  int64_t count = lora_tiles(slots, rows, a->slots, (int32_t*)(memory + tile_bytes + low_bytes), tiles);
  int64_t pieces = (width + LORA_RANKS - 1) / LORA_RANKS, bands = (a->outer + LORA_COLUMNS - 1) / LORA_COLUMNS;
  int few = team(count * pieces, LORA_RANKS * a->inner, threads);
  parallel(count * pieces, few, [=](int64_t i) {
    int64_t first = i % pieces * LORA_RANKS, last = first + LORA_RANKS < width ? first + LORA_RANKS : width;
    lora_ranks(a, x, x_stride, down, tiles[i / pieces], first, last, low, width);
  });
  few = team(count * bands, LORA_COLUMNS * a->rank, threads);
  parallel(count * bands, few, [=](int64_t i) {
    int64_t first = i % bands * LORA_COLUMNS, last = first + LORA_COLUMNS < a->outer ? first + LORA_COLUMNS : a->outer;
    lora_columns(a, up, tiles[i / bands], first, last, low, width, out);
  });
}

static void lora(const PgLora* a, const void* x, int64_t x_stride, const void* down, const void* up, const int32_t* slots, int64_t rows, void* out,
                 int threads) {
  if (a->type == PG_BF16)
    lora_of(a, (const bf16*)x, x_stride, (const bf16*)down, (const bf16*)up, slots, rows, (bf16*)out, threads);
  else
    lora_of(a, (const float*)x, x_stride, (const float*)down, (const float*)up, slots, rows, (float*)out, threads);
}

}  // namespace PG_ISA
