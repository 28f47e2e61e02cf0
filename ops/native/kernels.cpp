// All kernels for one instruction set; compiled once for each, with PG_ISA as its name.
#include "attention.h"
#include "gather.h"
#include "gemm.h"
#include "lora.h"
#include "pointwise.h"
#include "quant.h"

#define PG_TEXT_(x) #x
#define PG_TEXT(x) PG_TEXT_(x)
#define PG_JOIN_(a, b) a##b
#define PG_JOIN(a, b) PG_JOIN_(a, b)

extern const PgTable PG_JOIN(pg_table_, PG_ISA);
const PgTable PG_JOIN(pg_table_, PG_ISA) = {
    PG_TEXT(PG_ISA),      PG_ISA::pack,     PG_ISA::gemm,  PG_ISA::attention, PG_ISA::write_kv,
    PG_ISA::rope, PG_ISA::rms_norm, PG_ISA::gated_norm, PG_ISA::activation, PG_ISA::argmax,    PG_ISA::bitmask,
    PG_ISA::exp_row,
    PG_ISA::quant_bytes,  PG_ISA::quant_pack, PG_ISA::quant_gemm, PG_ISA::gather, PG_ISA::quant_gather,
    PG_ISA::lora,
    pg_sample,
};
