// Which instruction sets this library holds, and which of them this processor has. Compiled for the baseline.
#include <cstring>

#include "api.h"

extern const PgTable pg_table_baseline;
#if defined(__x86_64__)
extern const PgTable pg_table_avx2, pg_table_avx512, pg_table_avx512bf16;
#endif

namespace {

struct Offer {
  const PgTable* table;
  bool here;
};

int offers(Offer* out) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq");
  out[count++] = {&pg_table_avx512bf16, avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")};
  out[count++] = {&pg_table_avx512, avx512};
  out[count++] = {&pg_table_avx2, avx2};
#endif
  out[count++] = {&pg_table_baseline, true};
  return count;
}

}  // namespace

extern "C" {

// Kernels for the instruction set `name`, or for the best one when null; null where the processor or the library lacks it.
__attribute__((visibility("default"))) const PgTable* pg_table(const char* name) {
  Offer all[4];
  int count = offers(all);
  for (int i = 0; i < count; i++)
    if (all[i].here && (!name || !strcmp(name, all[i].table->name))) return all[i].table;
  return nullptr;
}
}
