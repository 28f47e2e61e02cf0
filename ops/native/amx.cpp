// Dense bfloat16 products with many rows on Intel's tiles; everything else is as for AVX-512 VNNI.
//
// The packed weights are what a tile wants of its right side: 16 pairs of inner indices of 16 columns, 128 bytes apart. Two by two
// tiles of sums stay in registers. Only where results may depend on the number of rows: a tile's order of sums is the processor's.
#include "gemm.h"

#if defined(PG_AMX_MODEL)
#include "amx_model.h"
#define PG_AMX 1
#elif defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define PG_AMX 1
#else
#define PG_AMX 0
#endif

extern const PgTable pg_table_avx512vnni, pg_table_amx;

// Whether the processor has tiles for bfloat16 and the system lets this process use them.
bool pg_amx_here() {
#if defined(PG_AMX_MODEL)
  return true;
#elif PG_AMX
  unsigned a = 7, b, c = 0, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;     // ARCH_REQ_XCOMP_PERM of Linux 5.16
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
  return false;
#endif
}

namespace PG_ISA {

#if PG_AMX

constexpr int64_t TILE_INNER = 32, TILES_ROWS = 32, ENOUGH_ROWS = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// x: [rows to whole tiles][inner to whole tiles], zeros behind.
static void tile_columns(const PgGemm* g, const bf16* x, int64_t ldx, int64_t rows, bf16* out, int64_t out_stride, int64_t first, int64_t last) {
  alignas(64) float sums[TILES_ROWS * GROUP];
  alignas(64) bf16 tail[TILE_INNER * GROUP] = {};
  TileConfig config;
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  int64_t whole = g->inner / TILE_INNER * TILE_INNER;
  for (int64_t n = first; n < last; n++) {
    const bf16* weight = (const bf16*)g->weight + n * g->inner * GROUP;
    memcpy(tail, weight + whole * GROUP, (size_t)((g->inner - whole) * GROUP) * sizeof(bf16));
    for (int64_t m = 0; m < rows; m += TILES_ROWS) {
      asm volatile("" ::: "memory");  // the compiler does not see what tiles are loaded from
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < ldx; k += TILE_INNER) {
        const bf16 *left = x + m * ldx + k, *right = k < whole ? weight + k * GROUP : tail;
        _tile_loadd(4, left, ldx * 2);
        _tile_loadd(5, left + 16 * ldx, ldx * 2);
        _tile_loadd(6, right, 4 * GROUP);
        _tile_loadd(7, right + GROUP, 4 * GROUP);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, sums, 4 * GROUP);
      _tile_stored(1, sums + 16, 4 * GROUP);
      _tile_stored(2, sums + 16 * GROUP, 4 * GROUP);
      _tile_stored(3, sums + 16 * GROUP + 16, 4 * GROUP);
      emit(g->bias, g->outer, rows - m < TILES_ROWS ? rows - m : TILES_ROWS, n * GROUP, GROUP, sums, GROUP, out + m * out_stride, out_stride);
    }
  }
  _tile_release();
}

static void tile_gemm(const PgGemm* g, const bf16* x, int64_t x_stride, int64_t rows, bf16* out, int64_t out_stride, int threads) {
  int64_t ldx = (g->inner + TILE_INNER - 1) / TILE_INNER * TILE_INNER, padded = (rows + TILES_ROWS - 1) / TILES_ROWS * TILES_ROWS;
  bf16* left = (bf16*)scratch<13>((size_t)(padded * ldx) * sizeof(bf16));
  for_rows(padded, team(padded, ldx, threads), [=](int64_t r) {
    int64_t there = r < rows ? g->inner : 0;
    if (there) memcpy(left + r * ldx, x + r * x_stride, (size_t)there * sizeof(bf16));
    memset(left + r * ldx + there, 0, (size_t)(ldx - there) * sizeof(bf16));
  });
  parallel_spans((g->outer + GROUP - 1) / GROUP, threads, [=](int64_t first, int64_t last) {
    tile_columns(g, left, ldx, rows, out, out_stride, first, last);
  });
}

static void amx_gemm(const PgGemm* g, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads) {
  if (g->type != PG_BF16 || !g->any_order || rows < ENOUGH_ROWS || g->outer == 0)
    return pg_table_avx512vnni.gemm(g, x, x_stride, rows, out, out_stride, threads);
  tile_gemm(g, (const bf16*)x, x_stride, rows, (bf16*)out, out_stride, threads);
}

#endif

static PgTable amx_table() {
  PgTable table = pg_table_avx512vnni;
  table.name = "amx";
#if PG_AMX
  table.gemm = amx_gemm;
#endif
  return table;
}

}  // namespace PG_ISA

const PgTable pg_table_amx = PG_ISA::amx_table();
