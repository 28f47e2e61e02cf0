// Products with weights in blocks of 32 where there is no 8-bit dot product: a panel of a group's codes becomes float32 in the
// first-level cache and meets all rows. One chain of sums a result: results do not depend on the number of rows.
#pragma once

namespace PG_ISA {

constexpr int64_t WIDE_DEPTH = 256;  // inner indices of a panel

// One packed block to float32, [32][32 columns].
static void widen_block(const Format& f, const uint8_t* block, float* out) {
  const uint8_t* tail = block + 2 * f.half_bytes();
  float scale[GROUP], shift[GROUP];
  for (int c = 0; c < GROUP; c++) {
    scale[c] = half_to_float(word_at(tail + 2 * c));
    shift[c] = (f.minimum ? half_to_float(word_at(tail + 64 + 2 * c)) : 0.0f) - scale[c] * (float)f.offset;
  }
  for (int i = 0; i < BLOCK; i++, out += GROUP)
    for (int c = 0; c < GROUP; c++) {
      const uint8_t* half = block + c / 16 * f.half_bytes();
      int quad = i / 4, lane = c % 16 * 4 + i % 4;
      int code = f.bits == 8 ? half[quad * 64 + lane] : half[quad / 2 * 64 + lane] >> quad % 2 * 4 & 15;
      out[c] = scale[c] * (float)code + shift[c];
    }
}

template <class T>
static void wide_part(const PgQuant* q, const float* x, int64_t rows, T* out, int64_t ldo, int64_t first, int64_t last) {
  const Format& f = FORMATS[q->kind];
  int64_t inner = q->inner, size = f.block_bytes();
  float* panel = (float*)scratch<12>(WIDE_DEPTH * GROUP * sizeof(float));
  float* sums = (float*)scratch<11>(SUPER_ROWS * GROUP * sizeof(float));
  for (int64_t m = 0; m < rows; m += SUPER_ROWS) {
    int64_t count = rows - m < SUPER_ROWS ? rows - m : SUPER_ROWS;
    for (int64_t g = first; g < last; g++) {
      const uint8_t* w = (const uint8_t*)q->weight + g * (inner / BLOCK) * size;
      for (int64_t k = 0; k < inner; k += WIDE_DEPTH) {
        int64_t depth = inner - k < WIDE_DEPTH ? inner - k : WIDE_DEPTH;
        for (int64_t i = 0; i < depth; i += BLOCK, w += size) widen_block(f, w, panel + i * GROUP);
        multiply<F32>(count, 1, x + m * inner + k, inner, panel, WIDE_DEPTH * GROUP, depth, sums, GROUP, k > 0);
      }
      emit(q->bias, q->outer, count, g * GROUP, GROUP, sums, GROUP, out + m * ldo, ldo);
    }
  }
}

template <class T>
static void wide_product(const PgQuant* q, const T* x, int64_t x_stride, int64_t rows, T* out, int64_t out_stride, int threads) {
  SuperInputs<T> in(super_format(FIRST_SUPER), x, x_stride, rows, q->inner, threads);
  int64_t groups = (q->outer + GROUP - 1) / GROUP;
  if (groups * q->inner * rows < 20000) threads = 1;
  parallel_spans(groups, threads, [&](int64_t first, int64_t last) { wide_part(q, in.x, rows, out, out_stride, first, last); });
}

static void quant_gemm(const PgQuant* q, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads) {
  if (q->kind >= FIRST_SUPER) return super_gemm(q, x, x_stride, rows, out, out_stride, threads);
  if (q->type == PG_F32)
    wide_product(q, (const float*)x, x_stride, rows, (float*)out, out_stride, threads);
  else
    wide_product(q, (const bf16*)x, x_stride, rows, (bf16*)out, out_stride, threads);
}

}  // namespace PG_ISA
