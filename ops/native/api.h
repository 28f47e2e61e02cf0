// The C ABI between Python and the kernels, and the table that each instruction set fills.
#pragma once


#include <cstdint>

extern "C" {

// PG_INT8 (pages alone): the numbers of a head, then their scale, a float32.
enum PgType : int32_t { PG_F32 = 0, PG_BF16 = 1, PG_INT8 = 2 };

// A packed weight: groups of 32 output columns, each [inner][32] float32 or [inner / 2][32][2] bfloat16; columns padded with zeros.
struct PgGemm {
  int64_t inner, outer;
  int32_t type;
  int32_t any_order;  // not 0: results may depend on the number of rows, where that is faster
  const void* weight;
  const float* bias;  // padded to groups, or null
};

// A weight in ggml's blocks, repacked by `quant_pack`; `kind` as in `quant.h` (blocks of 32) and `quant_super.h` (of 256).
struct PgQuant {
  int64_t inner, outer;
  int32_t kind, type;  // of the blocks; of inputs and outputs
  const void* weight;
  const float* bias;  // padded to groups of 32, or null
  const int8_t* grid;  // of the IQ formats, else null
  int32_t any_order;   // as in PgGemm
};

// Static facts of an attention layer. window, chunk: 0 for none. softcap: 0 for none. any_order: results may depend on the company of a row.
struct PgAttention {
  int32_t type, kv_type;
  int32_t heads, kv_heads, dim, v_dim, page_size, causal;
  int32_t any_order;
  int64_t window, chunk;
  float scale, softcap;
};

// A step's view of one cache group.
struct PgBatch {
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* table;
  int64_t table_stride;
  int64_t rows;
};

// Room for adapters beside a linear layer. `columns`: outputs of each part. Of each slot: down [parts · rank][inner], up [rank][outer].
struct PgLora {
  int64_t inner, outer, rank, slots, parts;
  int32_t type;
  const int64_t* columns;
};

// Element strides of the pages of one layer; the last dimension is contiguous.
struct PgPages {
  void *k, *v;
  int64_t k_page, k_token, k_head, v_page, v_token, v_head;
};
}

struct PgTable {
  const char* name;
  void (*pack)(const PgGemm*, const void* source, int64_t stride, void* packed);
  void (*gemm)(const PgGemm*, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads);
  void (*attention)(const PgAttention*, const PgBatch*, const PgPages*, const void* q, int64_t q_token, int64_t q_head, int64_t tokens,
                    void* out, const float* sinks, const float* slopes, int threads);
  void (*write_kv)(const PgAttention*, const PgPages*, const void* k, int64_t k_token, int64_t k_head, const void* v, int64_t v_token,
                   int64_t v_head, const int64_t* slots, int64_t tokens, int threads);
  void (*rope)(void* x, int type, int64_t token_stride, int64_t head_stride, int64_t tokens, int64_t heads, int64_t rotary, int interleaved,
               const float* cos, const float* sin, int64_t angle_stride, int threads);
  void (*rms_norm)(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride, const void* weight, float offset, float eps,
                   int type, int64_t rows, int64_t width, void* out, void* total, int threads);
  // Each of the `groups` parts of a row, `width` numbers, by itself. weight_step: from one part's weights to the next one's, 0 where all share
  // them. silu: what becomes of the gate, else its sigmoid. gate_first: multiplied before the norm, else after it.
  void (*gated_norm)(const void* x, int64_t x_stride, const void* gate, int64_t gate_stride, const void* weight, int64_t weight_step, float eps,
                     int type, int silu, int gate_first, int64_t rows, int64_t groups, int64_t width, void* out, int threads);
  // `width`: of the output; gated inputs are twice as wide. limit 0: no clamp. alpha: of the last kind. shift: added to the second half.
  void (*activation)(const void* x, int64_t x_stride, int type, int kind, int gated, float limit, float alpha, float shift, int64_t rows,
                     int64_t width, void* out, int threads);
  // mask: null, or which columns are looked at, as in `bitmask`. bad: whether a row holds NaN there. 0 where no such column is above −∞.
  void (*argmax)(const void* x, int64_t stride, int type, int64_t rows, int64_t width, const int32_t* mask, int64_t* out, bool* bad,
                 int threads);
  // In place: −∞ where a row's bit is 0; bit i of its word w is column 32 w + i, and it has as many words as its columns need.
  void (*bitmask)(void* x, int64_t stride, int type, int64_t rows, int64_t width, const int32_t* mask, int threads);
  // weights[i] = e^((x[i] − top) · factor), 0 where `mask`, if there is one, has 0; their sum is returned.
  double (*exp_row)(const void* x, int type, int64_t width, const int32_t* mask, float top, float factor, float* weights);
  int64_t (*quant_bytes)(const PgQuant*);
  void (*quant_pack)(const PgQuant*, const void* blocks, int64_t row_bytes, void* packed);
  void (*quant_gemm)(const PgQuant*, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride, int threads);
  // Rows `ids` of packed weights, as numbers of their `type`.
  void (*gather)(const PgGemm*, const int64_t* ids, int64_t count, void* out, int64_t out_stride, int threads);
  void (*quant_gather)(const PgQuant*, const int64_t* ids, int64_t count, void* out, int64_t out_stride, int threads);
  // out += x · downᵀ · up of each row's slot; rows of slot −1 stay as they are.
  void (*lora)(const PgLora*, const void* x, int64_t x_stride, const void* down, const void* up, const int32_t* slots, int64_t rows, void* out,
               int threads);
  // The one function that is the same for all instruction sets; `table` gives it exponentials and maxima.
  void (*sample)(const PgTable* table, const void* logits, int64_t stride, int type, int64_t rows, int64_t width, const int32_t* mask,
                 const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p, const int64_t* seed,
                 const int64_t* position, int64_t* out, bool* bad, int threads);
};

void pg_sample(const PgTable* table, const void* logits, int64_t stride, int type, int64_t rows, int64_t width, const int32_t* mask,
               const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p, const int64_t* seed,
               const int64_t* position, int64_t* out, bool* bad, int threads);
