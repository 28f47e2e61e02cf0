// The tile instructions that `amx.cpp` uses, in plain C++, to run its loops where there are no tiles (`-DPG_AMX_MODEL`; never in a product).
#pragma once

#include <cstdint>
#include <cstring>

namespace PG_ISA {

static thread_local uint8_t model_tiles[8][16][64];

static void model_dot(int sums, int left, int right) {
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float total;
      memcpy(&total, &model_tiles[sums][m][4 * n], 4);
      for (int k = 0; k < 32; k++) {
        bf16 a, b;
        memcpy(&a, &model_tiles[left][m][2 * k], 2);
        memcpy(&b, &model_tiles[right][k / 2][4 * n + k % 2 * 2], 2);
        total += to_float(a) * to_float(b);
      }
      memcpy(&model_tiles[sums][m][4 * n], &total, 4);
    }
}

static void model_move(int tile, char* memory, int64_t stride, bool load) {
  for (int r = 0; r < 16; r++)
    load ? memcpy(model_tiles[tile][r], memory + r * stride, 64) : memcpy(memory + r * stride, model_tiles[tile][r], 64);
}

}  // namespace PG_ISA

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (void)(config)
#define _tile_release() (void)0
#define _tile_zero(tile) memset(model_tiles[tile], 0, sizeof model_tiles[tile])
#define _tile_loadd(tile, memory, stride) model_move(tile, (char*)(memory), stride, true)
#define _tile_stored(tile, memory, stride) model_move(tile, (char*)(memory), stride, false)
#define _tile_dpbf16ps(sums, left, right) model_dot(sums, left, right)
