// Runs recorded kernel calls against a library of kernels and compares with float64 truth: `driver LIBRARY CASES [LEVEL…]`.
//
// Needs nothing but the C ABI, so it runs where Python does not: on another architecture, under a sanitizer. Cases are written by
// tests/samples/native_cases.py. Every buffer has its exact size: it ends where a page that nobody may touch begins, or, under a
// sanitizer, where its own zone does. Outputs are filled with ones (NaN) first. Each case runs with one and with three threads, and once
// more from a recording. For each level and case a line: `ok`, `absent` or what is wrong. Level `best`: whichever the library
// chooses, by its name.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../ops/native/api.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool SANITIZED = true;
#else
constexpr bool SANITIZED = false;
#endif

namespace {

enum Role : uint8_t { INPUT, OUTPUT, MUTATED, PACKED };  // PACKED: written once, not by what a recording holds
enum Type : uint8_t { F32, BF16, I64, BYTE };

struct Reader {
  FILE* file;
  template <class T>
  T get() {
    T value;
    if (fread(&value, sizeof value, 1, file) != 1) fail();
    return value;
  }
  std::string bytes(size_t count) {
    std::string text(count, 0);
    if (count && fread(&text[0], count, 1, file) != 1) fail();
    return text;
  }
  std::string text() { return bytes(get<uint32_t>()); }
  [[noreturn]] void fail() {
    fprintf(stderr, "the file of cases ends early\n");
    exit(2);
  }
};

struct Link {
  uint32_t offset, target;
  uint64_t addend;
};

struct Buffer {
  Role role;
  uint32_t align;
  std::string content;  // of the right size for outputs too
  std::vector<Link> links;
  char *map = nullptr, *data = nullptr;
  size_t mapped = 0;
};

struct Argument {
  char kind;  // i: number, f: real, p: address, 0: null, t: table, h: threads
  int64_t number;
  double real;
  uint32_t buffer;
};

struct Call {
  std::string function;
  std::vector<Argument> arguments;
};

struct Check {
  uint32_t buffer;
  Type type;
  double allowed;  // of the largest number; NaN wanted: the bits that were there
  std::vector<double> want;
};

struct Case {
  std::string name;
  std::vector<Buffer> buffers;
  std::vector<Call> calls;
  std::vector<Check> checks;
  std::vector<double> returns;  // one for each call; NaN: none
};

const char* current = "";

void crashed(int signal) {
  char text[256];
  int length = snprintf(text, sizeof text, "%s\tsignal %d: touched memory that is not its own\n", current, signal);
  if (write(1, text, (size_t)length)) {}
  _exit(3);
}

Case read_case(Reader& in) {
  Case c;
  c.name = in.text();
  c.buffers.resize(in.get<uint32_t>());
  for (Buffer& b : c.buffers) {
    b.role = in.get<Role>();
    b.align = in.get<uint32_t>();
    uint64_t size = in.get<uint64_t>();
    b.content = b.role == OUTPUT || b.role == PACKED ? std::string(size, '\xff') : in.bytes(size);
    b.links.resize(in.get<uint32_t>());
    for (Link& l : b.links) l = {in.get<uint32_t>(), in.get<uint32_t>(), in.get<uint64_t>()};
  }
  c.calls.resize(in.get<uint32_t>());
  for (Call& call : c.calls) {
    call.function = in.text();
    call.arguments.resize(in.get<uint32_t>());
    for (Argument& a : call.arguments) a = {in.get<char>(), in.get<int64_t>(), in.get<double>(), in.get<uint32_t>()};
    c.returns.push_back(in.get<double>());
  }
  c.checks.resize(in.get<uint32_t>());
  for (Check& k : c.checks) {
    k.buffer = in.get<uint32_t>(), k.type = in.get<Type>(), k.allowed = in.get<double>();
    k.want.resize(in.get<uint64_t>());
    for (double& x : k.want) x = in.get<double>();
  }
  return c;
}

void place(Buffer& b) {
  size_t size = b.content.size(), page = 65536;
  if (SANITIZED) {
    b.data = (char*)malloc(size);
    return;
  }
  size_t front = (size + page - 1) / page * page;
  b.mapped = front + 2 * page;
  b.map = (char*)mmap(nullptr, b.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (b.map == MAP_FAILED) exit(2);
  mprotect(b.map, page, PROT_NONE);
  mprotect(b.map + page + front, page, PROT_NONE);
  b.data = b.map + page + (front - size) / b.align * b.align;
}

void drop(Buffer& b) {
  if (SANITIZED)
    free(b.data);
  else
    munmap(b.map, b.mapped);
}

// `again`: before a recording runs, what was packed stays.
void fill(Case& c, bool again) {
  for (Buffer& b : c.buffers) {
    if (again && b.role == PACKED) continue;
    if (!b.content.empty()) memcpy(b.data, b.content.data(), b.content.size());
    for (const Link& l : b.links) {
      char* target = c.buffers[l.target].data + l.addend;
      memcpy(b.data + l.offset, &target, sizeof target);
    }
  }
}

struct Context {
  const PgTable* table;
  const Case* test;
  int threads;
};

template <class T>
T argument(const Context& at, const Argument& a) {
  if constexpr (std::is_pointer_v<T>) {
    if (a.kind == '0') return nullptr;
    if (a.kind == 't') return (T)(const void*)at.table;
    if (a.kind != 'p') exit(2);
    return (T)(void*)(at.test->buffers[a.buffer].data + a.number);
  } else {
    return a.kind == 'h' ? (T)at.threads : a.kind == 'f' ? (T)a.real : (T)a.number;
  }
}

template <class R, class... A, size_t... I>
double invoke(const Context& at, R (*function)(A...), const Call& call, std::index_sequence<I...>) {
  if (call.arguments.size() != sizeof...(A)) {
    fprintf(stderr, "%s takes %zu arguments, the case has %zu\n", call.function.c_str(), sizeof...(A), call.arguments.size());
    exit(2);
  }
  if constexpr (std::is_void_v<R>) {
    function(argument<A>(at, call.arguments[I])...);
    return NAN;
  } else {
    return (double)function(argument<A>(at, call.arguments[I])...);
  }
}

template <class R, class... A>
double invoke(const Context& at, R (*function)(A...), const Call& call) {
  return invoke(at, function, call, std::index_sequence_for<A...>());
}

double dispatch(const Context& at, const Call& call) {
  const PgTable* t = at.table;
#define PG_MEMBER(name) \
  if (call.function == #name) return invoke(at, t->name, call);
#include "members.inc"
#undef PG_MEMBER
  fprintf(stderr, "the driver was compiled without %s\n", call.function.c_str());
  exit(2);
}

double number(const char* p, Type type, size_t i) {
  if (type == BYTE) return (double)(uint8_t)p[i];
  if (type == I64) {
    int64_t x;
    memcpy(&x, p + i * 8, 8);
    return (double)x;
  }
  float f;
  if (type == BF16) {
    uint16_t half;
    memcpy(&half, p + i * 2, 2);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&f, &bits, 4);
  } else {
    memcpy(&f, p + i * 4, 4);
  }
  return f;
}

// What is wrong with a buffer, else nothing; *worst: the largest error in units of what is allowed.
std::string judge(const Case& c, const Check& k, double* worst) {
  static const size_t SIZES[] = {4, 2, 8, 1};
  const Buffer& b = c.buffers[k.buffer];
  double largest = 1e-30;
  for (double x : k.want)
    if (std::isfinite(x)) largest = std::fmax(largest, std::fabs(x));
  for (size_t i = 0; i < k.want.size(); i++) {
    double want = k.want[i], have = number(b.data, k.type, i), error = std::fabs(have - want) / largest;
    bool same = memcmp(b.data + i * SIZES[k.type], b.content.data() + i * SIZES[k.type], SIZES[k.type]) == 0;
    bool wrong = std::isnan(want) ? !same : std::isinf(want) ? have != want : !(error <= k.allowed);
    if (wrong) {
      char text[200];
      snprintf(text, sizeof text, "buffer %u [%zu]: %g, not %g (largest %g, allowed %g of it)", k.buffer, i, have, want, largest, k.allowed);
      return text;
    }
    if (std::isfinite(want) && k.allowed > 0) *worst = std::fmax(*worst, error / k.allowed);
  }
  return "";
}

std::string judge_all(const Case& c, double* worst) {
  for (const Buffer& b : c.buffers)
    if (b.role == INPUT && b.links.empty() && !b.content.empty() && memcmp(b.data, b.content.data(), b.content.size()))
      return "changed an input";
  for (const Check& k : c.checks) {
    std::string problem = judge(c, k, worst);
    if (!problem.empty()) return problem;
  }
  return "";
}

struct Library {
  const PgTable* (*table)(const char*);
  void* (*record)();
  void (*stop)();
  int64_t (*length)(const void*);
  void (*replay)(const void*, int64_t, int64_t);
  void (*free)(void*);
  explicit Library(const char* path) {
    void* handle = dlopen(path, RTLD_NOW);
    if (!handle) {
      fprintf(stderr, "%s\n", dlerror());
      exit(2);
    }
    get(handle, "pg_table", table), get(handle, "pg_record", record), get(handle, "pg_stop", stop);
    get(handle, "pg_length", length), get(handle, "pg_replay", replay), get(handle, "pg_free", free);
  }
  template <class F>
  static void get(void* handle, const char* name, F& function) {
    function = (F)dlsym(handle, name);
    if (!function) exit(2);
  }
};

std::string run(const Library& library, Case& c, const PgTable* table, double* worst) {
  for (int threads : {1, 3}) {
    fill(c, false);
    Context at{table, &c, threads};
    void* program = library.record();
    for (size_t i = 0; i < c.calls.size(); i++) {
      double result = dispatch(at, c.calls[i]);
      if (!std::isnan(c.returns[i]) && std::fabs(result - c.returns[i]) > 1e-5 * std::fabs(c.returns[i])) {
        library.stop();
        return c.calls[i].function + " returned " + std::to_string(result) + ", not " + std::to_string(c.returns[i]);
      }
    }
    library.stop();
    std::string problem = judge_all(c, worst);
    if (problem.empty() && library.length(program)) {
      fill(c, true);
      library.replay(program, 0, library.length(program));
      problem = judge_all(c, worst);
      if (!problem.empty()) problem = "replayed: " + problem;
    }
    library.free(program);
    if (!problem.empty()) return problem + ", threads " + std::to_string(threads);
  }
  return "";
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (!SANITIZED)
    for (int caught : {SIGSEGV, SIGBUS, SIGILL}) signal(caught, crashed);
  Library library(words[1]);
  std::vector<std::string> levels(words + 3, words + count);
  Reader in{fopen(words[2], "rb")};
  if (!in.file) return 2;
  bool failed = false;
  for (uint32_t cases = in.get<uint32_t>(); cases; cases--) {
    Case c = read_case(in);
    for (Buffer& b : c.buffers) place(b);
    for (const std::string& level : levels) {
      const PgTable* table = library.table(level == "best" ? nullptr : level.c_str());
      std::string label = (level == "best" && table ? table->name : level) + "\t" + c.name;
      current = label.c_str();
      double worst = 0;
      std::string problem = table ? run(library, c, table, &worst) : "absent";
      if (problem.empty())
        printf("%s\tok\t%.4f\n", current, worst);
      else
        printf("%s\t%s\n", current, problem.c_str()), failed = true;
    }
    for (Buffer& b : c.buffers) drop(b);
  }
  return failed;
}
