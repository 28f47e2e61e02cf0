// Which instruction sets this library holds, which of them this processor has, and programs: kernel calls recorded to run again.
// Compiled for the baseline.
#include <cstring>
#include <functional>
#include <vector>

#include "api.h"

#define PG_EXPORT extern "C" __attribute__((visibility("default")))

extern const PgTable pg_table_baseline;
#if defined(__x86_64__)
extern const PgTable pg_table_avx2, pg_table_avx512, pg_table_avx512vnni, pg_table_avx512bf16, pg_table_amx;
bool pg_amx_here();
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
extern const PgTable pg_table_dotprod, pg_table_i8mm;
#endif

namespace {

// Best first.
const PgTable* const TABLES[] = {
#if defined(__x86_64__)
    &pg_table_amx, &pg_table_avx512bf16, &pg_table_avx512vnni, &pg_table_avx512, &pg_table_avx2,
#elif defined(__aarch64__)
    &pg_table_i8mm, &pg_table_dotprod,
#endif
    &pg_table_baseline,
};
constexpr int COUNT = sizeof TABLES / sizeof *TABLES;

#if defined(__aarch64__)
bool arm_has(const char* feature) {
#if defined(__linux__)
  // Bits of the kernel's interface: arch/arm64/include/uapi/asm/hwcap.h.
  if (!strcmp(feature, "DotProd")) return getauxval(AT_HWCAP) >> 20 & 1;
  if (!strcmp(feature, "I8MM")) return getauxval(AT_HWCAP2) >> 13 & 1;
  if (!strcmp(feature, "BF16")) return getauxval(AT_HWCAP2) >> 14 & 1;
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  char name[64] = "hw.optional.arm.FEAT_";
  strncat(name, feature, 32);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
#endif
  return false;
}
#endif

bool here(int index) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq");
  const PgTable* table = TABLES[index];
  bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (table == &pg_table_amx) return vnni && pg_amx_here();
  if (table == &pg_table_avx512bf16) return vnni && __builtin_cpu_supports("avx512bf16");
  if (table == &pg_table_avx512vnni) return vnni;
  if (table == &pg_table_avx512) return avx512;
  if (table == &pg_table_avx2) return avx2;
#elif defined(__aarch64__)
  if (TABLES[index] == &pg_table_i8mm) return arm_has("DotProd") && arm_has("I8MM") && arm_has("BF16");
  if (TABLES[index] == &pg_table_dotprod) return arm_has("DotProd");
#endif
  return true;
}

// Intel's processors have the bfloat16 dot product at half the rate of float32's (and at an eighth of the 16-bit integers'): there the
// table without it is the faster one for everything.
bool slow(int index) {
#if defined(__x86_64__)
  return TABLES[index] == &pg_table_avx512bf16 && __builtin_cpu_is("intel");
#endif
  return false;
}

typedef std::vector<std::function<void()>> Program;

// The program that this thread's calls are written into, while they also run.
thread_local Program* recording = nullptr;

template <int TABLE, auto MEMBER, class TYPE = decltype(MEMBER)>
struct Recorded;

template <int TABLE, auto MEMBER, class... A>
struct Recorded<TABLE, MEMBER, void (*PgTable::*)(A...)> {
  static void call(A... arguments) {
    auto kernel = TABLES[TABLE]->*MEMBER;
    Program* program = recording;
    if (program) program->emplace_back([=] { kernel(arguments...); });
    recording = nullptr;  // what a kernel calls is part of it
    kernel(arguments...);
    recording = program;
  }
};

// The kernels of a table, recorded where a program asks for it.
template <int TABLE>
const PgTable* recorded() {
  static const PgTable table = [] {
    PgTable t = *TABLES[TABLE];
    t.gemm = Recorded<TABLE, &PgTable::gemm>::call;
    t.attention = Recorded<TABLE, &PgTable::attention>::call;
    t.write_kv = Recorded<TABLE, &PgTable::write_kv>::call;
    t.rope = Recorded<TABLE, &PgTable::rope>::call;
    t.rms_norm = Recorded<TABLE, &PgTable::rms_norm>::call;
    t.gated_norm = Recorded<TABLE, &PgTable::gated_norm>::call;
    t.activation = Recorded<TABLE, &PgTable::activation>::call;
    t.argmax = Recorded<TABLE, &PgTable::argmax>::call;
    t.bitmask = Recorded<TABLE, &PgTable::bitmask>::call;
    t.quant_gemm = Recorded<TABLE, &PgTable::quant_gemm>::call;
    t.gather = Recorded<TABLE, &PgTable::gather>::call;
    t.quant_gather = Recorded<TABLE, &PgTable::quant_gather>::call;
    t.lora = Recorded<TABLE, &PgTable::lora>::call;
    t.sample = Recorded<TABLE, &PgTable::sample>::call;
    return t;
  }();
  return &table;
}

const PgTable* table_of(int index) {
  switch (index) {
    case 0: return recorded<0>();
#if defined(__x86_64__)
    case 1: return recorded<1>();
    case 2: return recorded<2>();
    case 3: return recorded<3>();
    case 4: return recorded<4>();
    case 5: return recorded<5>();
#elif defined(__aarch64__)
    case 1: return recorded<1>();
    case 2: return recorded<2>();
#endif
  }
  return nullptr;
}

}  // namespace

// Kernels for the instruction set `name`, or for the best one when null; null where the processor or the library lacks it.
PG_EXPORT const PgTable* pg_table(const char* name) {
  for (int i = 0; i < COUNT; i++)
    if (here(i) && (name ? !strcmp(name, TABLES[i]->name) : !slow(i))) return table_of(i);
  return nullptr;
}

// From now on this thread's calls are also written into a new program, until `pg_stop`.
PG_EXPORT void* pg_record() { return recording = new Program; }
PG_EXPORT void pg_stop() { recording = nullptr; }
PG_EXPORT int64_t pg_length(const void* program) { return (int64_t)((const Program*)program)->size(); }

// Runs the calls [first, last) of a program again, with the arguments that they had.
PG_EXPORT void pg_replay(const void* program, int64_t first, int64_t last) {
  const Program& calls = *(const Program*)program;
  for (int64_t i = first; i < last; i++) calls[i]();
}

PG_EXPORT void pg_free(void* program) { delete (Program*)program; }
