// Attention over pages (arXiv:2309.06180) for a ragged batch, by tiles with running softmax statistics (arXiv:2205.14135).
//
// A task is some query tokens of one request and all query heads of one KV head, so that K and V are read once per group of heads.
// Keys go by in blocks of 256 at fixed positions; a block gives each row its own maximum, sum and values, and blocks are merged in
// order. A row's result therefore depends neither on the batch nor on how the prompt was cut, nor on which threads took part.
#pragma once

#include "api.h"
#include "microkernel.h"
#include "pointwise.h"
#include "scratch.h"

namespace PG_ISA {

constexpr int64_t KEYS = 256;      // keys of a block
constexpr int64_t TILE_ROWS = 96;  // rows (tokens times heads of a group) of a task
constexpr int64_t MOST_KEPT = 8 << 20;  // bytes of blocks' results that wait to be joined

// Query, key and value as the products want them: bfloat16 pairs where the machine multiplies those and both sides are, else float32.
template <class K>
struct Tiles {
  typedef typename K::A E;
  E *q, *keys, *values, *weights;
  float *logits, *part, *out, *top, *sum;
};

struct Shape {
  const PgAttention* f;
  int64_t group, dim, v_dim, v_groups;
  explicit Shape(const PgAttention* facts)
      : f(facts), group(facts->heads / facts->kv_heads), dim(facts->dim), v_dim(facts->v_dim), v_groups((facts->v_dim + GROUP - 1) / GROUP) {}
  int64_t ldv() const { return v_groups * GROUP; }
};

template <class K>
static Tiles<K> carve(const Shape& s, int64_t rows) {
  typedef typename K::A E;
  int64_t sizes[] = {rows * s.dim * (int64_t)sizeof(E), KEYS * s.dim * (int64_t)sizeof(E), KEYS * s.ldv() * (int64_t)sizeof(E),
                     rows * KEYS * (int64_t)sizeof(E),  rows * KEYS * 4, rows * s.ldv() * 4, rows * s.ldv() * 4, rows * 4, rows * 4};
  int64_t offset[10] = {0};
  for (int i = 0; i < 9; i++) offset[i + 1] = offset[i] + (sizes[i] + 127) / 64 * 64;
  char* base = (char*)scratch<2>(offset[9]);
  Tiles<K> t;
  t.q = (E*)(base + offset[0]);
  t.keys = (E*)(base + offset[1]);
  t.values = (E*)(base + offset[2]);
  t.weights = (E*)(base + offset[3]);
  t.logits = (float*)(base + offset[4]);
  t.part = (float*)(base + offset[5]);
  t.out = (float*)(base + offset[6]);
  t.top = (float*)(base + offset[7]);
  t.sum = (float*)(base + offset[8]);
  return t;
}

PG_INLINE void assign(float* to, float from) { *to = from; }
PG_INLINE void assign(float* to, bf16 from) { *to = to_float(from); }
PG_INLINE void assign(bf16* to, bf16 from) { *to = from; }
PG_INLINE void assign(bf16* to, float from) { put(to, from); }

typedef int8_t vc __attribute__((vector_size(PG_W)));

// Numbers of a head as int8, and after them the scale of all, float32: x ≈ code · scale, the largest has code ±127.
template <class Q>
PG_INLINE void shrink(const Q* from, int64_t dim, int8_t* to) {
  vf top = {};
  for (int64_t d = 0; d < dim; d += W) {
    vf x = load_some(from + d, dim - d);
    top = vmax(top, vmax(x, -x));
  }
  float largest = max(top), scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
  for (int64_t d = 0; d < dim; d += W) {
    vf x = vmin(vmax(load_some(from + d, dim - d) * inverse, splat(-127.0f)), splat(127.0f));
    vc codes = __builtin_convertvector((vi)(x + 12582912.0f) - 0x4b400000, vc);  // rounds to the nearest
    memcpy(to + d, &codes, dim - d < W ? dim - d : W);
  }
  memcpy(to + dim, &scale, 4);
}

PG_INLINE void widen(const int8_t* from, int64_t dim, float* to) {
  float scale;
  memcpy(&scale, from + dim, 4);
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(to + d, __builtin_convertvector(load_as<vc>(from + d), vf) * scale);
  for (; d < dim; d++) to[d] = (float)from[d] * scale;
}

// Keys [count][dim] → groups of 32 keys, [dim / STEP][32][STEP].
template <class K, class T>
PG_INLINE void pack_keys_plain(const T* const* rows, int64_t count, int64_t dim, typename K::A* out) {
  for (int64_t j = 0; j < count; j++) {
    typename K::A* column = out + j / GROUP * GROUP * dim + j % GROUP * K::STEP;
    for (int64_t d = 0; d < dim; d += K::STEP)
      for (int p = 0; p < K::STEP; p++) assign(column + d * GROUP + p, rows[j][d + p]);
  }
}

#if PG_W == 16
// Sixteen vectors of sixteen words, rows become columns.
PG_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++)
    for (int h = 0; h < 2; h++) {
      t[h * 8 + i] = _mm512_shuffle_i32x4(r[h * 8 + i], r[h * 8 + 4 + i], 0x88);
      t[h * 8 + 4 + i] = _mm512_shuffle_i32x4(r[h * 8 + i], r[h * 8 + 4 + i], 0xdd);
    }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

// `words` 32-bit words of each of sixteen rows, a multiple of sixteen, to columns `ld` words apart. WIDEN: rows are bfloat16, words float32.
template <bool WIDEN>
PG_INLINE void pack_sixteen(const void* const* rows, int64_t words, uint32_t* out, int64_t ld) {
  for (int64_t w = 0; w < words; w += 16) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      r[i] = WIDEN ? (__m512i)load((const bf16*)rows[i] + w) : _mm512_loadu_si512((const uint32_t*)rows[i] + w);
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (w + i) * ld, r[i]);
  }
}
#endif

template <class K, class T>
static void pack_keys(const T* const* rows, int64_t count, int64_t dim, typename K::A* out) {
#if PG_W == 16
  constexpr bool widen = sizeof(T) == 2 && K::STEP == 1;
  int64_t words = dim / K::STEP;
  if ((sizeof(T) == sizeof(typename K::A) || widen) && words % 16 == 0) {
    for (int64_t j = 0; j < count; j += 16) {
      const void* sixteen[16];
      for (int i = 0; i < 16; i++) sixteen[i] = rows[j + i < count ? j + i : count - 1];
      uint32_t* column = (uint32_t*)(out + j / GROUP * GROUP * dim) + j % GROUP;
      pack_sixteen<widen>(sixteen, words, column, GROUP);
    }
    return;
  }
#endif
  pack_keys_plain<K>(rows, count, dim, out);
}

// Asks for rows [first, last) of `bytes` bytes each.
template <class T>
PG_INLINE void fetch(const T* const* rows, int64_t first, int64_t last, int64_t count, int64_t bytes) {
  for (int64_t j = first; j < last && j < count; j++)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)rows[j] + at);
}

// Values [count][v_dim] → groups of 32 columns, `ld` keys long, [ld / STEP][32][STEP]; up to `padded`, zeros where there is no key or no column.
template <class K, class T>
static void pack_values(const T* const* rows, int64_t count, int64_t padded, int64_t ld, int64_t v_dim, int64_t v_groups, typename K::A* out) {
  typedef typename K::A E;
  for (int64_t j = 0; j < padded; j += K::STEP)
    for (int64_t g = 0; g < v_groups; g++) {
      E* target = out + (g * ld + j) * GROUP;
      int64_t columns = v_dim - g * GROUP < GROUP ? v_dim - g * GROUP : GROUP;
#if PG_DOT16 && PG_W == 16
      if (K::STEP == 2 && sizeof(T) == 2 && columns == GROUP) {
        __m512i a = j < count ? _mm512_loadu_si512(rows[j] + g * GROUP) : _mm512_setzero_si512();
        __m512i b = j + 1 < count ? _mm512_loadu_si512(rows[j + 1] + g * GROUP) : _mm512_setzero_si512();
        __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        __m512i first = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
        __m512i second = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high);
        _mm512_storeu_si512(target, first);
        _mm512_storeu_si512(target + GROUP, second);
        continue;
      }
#endif
      if (K::STEP == 1 && columns == GROUP && j < count) {
        for (int64_t c = 0; c < GROUP; c += W) store((float*)target + c, load(rows[j] + g * GROUP + c));
        continue;
      }
      for (int64_t c = 0; c < GROUP; c++)
        for (int p = 0; p < K::STEP; p++) {
          bool there = j + p < count && c < columns;
          if (there)
            assign(target + c * K::STEP + p, rows[j + p][g * GROUP + c]);
          else
            target[c * K::STEP + p] = E(0);
        }
    }
}

// Keys that the query at `position` sees: [low, high).
struct Span {
  int64_t low, high;
  Span(const PgAttention* f, int64_t position, int64_t length) : low(0), high(f->causal && position + 1 < length ? position + 1 : length) {
    if (f->window && position - f->window + 1 > low) low = position - f->window + 1;
    if (f->chunk && position / f->chunk * f->chunk > low) low = position / f->chunk * f->chunk;
    if (f->chunk && (position / f->chunk + 1) * f->chunk < high) high = (position / f->chunk + 1) * f->chunk;
  }
};

struct Task {
  int64_t request, head, first, tokens;  // tokens [first, first + tokens) of the batch
  int64_t position, length;              // of the first token, and of the request
};

// One row's logits in one block → weights and statistics. Keys outside [low, high), which are relative to the block, get weight zero.
template <class E>
PG_INLINE void soften(const PgAttention* f, float* logits, E* weights, int64_t low, int64_t high, int64_t padded, float slope, float far,
                      float* top, float* total) {
  *top = -INFINITY, *total = 0;
  if (high <= low) {
    memset(weights, 0, padded * sizeof(E));
    return;
  }
  vf best = splat(-INFINITY);
  alignas(64) float lane[W];
  for (int i = 0; i < W; i++) lane[i] = (float)i;
  vf lanes = load(lane);
  for (int64_t j = low / W * W; j < high; j += W) {
    vf x = load(logits + j) * f->scale;
    if (f->softcap > 0) x = f->softcap * tanh(x / f->softcap);
    if (slope != 0) x = x - slope * (far - ((float)j + lanes));
    vf index = (float)j + lanes;
    x = index < (float)low ? splat(-INFINITY) : x;
    x = index < (float)high ? x : splat(-INFINITY);
    store(logits + j, x);
    best = vmax(x, best);
  }
  float peak = max(best);
  vf sums = {};
  for (int64_t j = 0; j < padded; j += W) {
    vf w = {};
    if (j + W > low && j < high) w = exp(load(logits + j) - peak);
    sums += w;
    store(weights + j, w);
  }
  *top = peak;
  *total = sum(sums);
}

template <class K, class Q, class T>
struct Attention {
  typedef typename K::A E;
  static constexpr int64_t tail = sizeof(T) == 1 ? 4 : 0;  // bytes of the scale behind a head's numbers
  Shape s;
  const PgBatch* batch;
  const PgPages* pages;
  const Q* q;
  int64_t q_token, q_head;
  Q* out;
  const float *sinks, *slopes;

  void load_queries(const Task& t, Tiles<K>& tiles) const {
    for (int64_t i = 0; i < t.tokens; i++)
      for (int64_t g = 0; g < s.group; g++) {
        const Q* from = q + (t.first + i) * q_token + (t.head * s.group + g) * q_head;
        E* to = tiles.q + (i * s.group + g) * s.dim;
        for (int64_t d = 0; d < s.dim; d++) assign(to + d, from[d]);
      }
  }

  // Row addresses of keys [low, high) of a request.
  void rows_of(const Task& t, int64_t low, int64_t high, const T** k, const T** v) const {
    const int32_t* table = batch->table + t.request * batch->table_stride;
    int64_t size = s.f->page_size, entry = low / size, offset = low % size;
    for (int64_t j = low; j < high; entry++, offset = 0) {
      const T* k_row = (const T*)pages->k + table[entry] * pages->k_page + offset * pages->k_token + t.head * pages->k_head;
      const T* v_row = (const T*)pages->v + table[entry] * pages->v_page + offset * pages->v_token + t.head * pages->v_head;
      int64_t last = j + size - offset < high ? j + size - offset : high;
      for (; j < last; j++, k_row += pages->k_token, v_row += pages->v_token) *k++ = k_row, *v++ = v_row;
    }
  }

  // Of int8 pages: rows as numbers, 32 at a time, which lie where they are until the next call.
  static const float* const* widened(const int8_t* const* rows, int64_t count, int64_t dim) {
    static thread_local const float* at[GROUP];
    float* numbers = (float*)scratch<7>(GROUP * dim * sizeof(float));
    for (int64_t j = 0; j < count; j++) widen(rows[j], dim, numbers + j * dim), at[j] = numbers + j * dim;
    return at;
  }

  // Keys and values are packed in groups of 32; `j`: the first of the group, `left`: keys from there.
  PG_INLINE void pack_key_group(const T* const* k, int64_t j, int64_t left, const Shape& s, const Tiles<K>& tiles) {
    int64_t count = left < GROUP ? left : GROUP;
    if constexpr (sizeof(T) == 1)
      pack_keys<K>(widened(k + j, count, s.dim), count, s.dim, tiles.keys + j * s.dim);
    else
      pack_keys<K>(k + j, count, s.dim, tiles.keys + j * s.dim);
  }

  PG_INLINE void pack_all_values(const T* const* v, int64_t count, int64_t padded, const Shape& s, const Tiles<K>& tiles) {
    if constexpr (sizeof(T) == 1) {
      for (int64_t j = 0; j < padded; j += GROUP) {
        int64_t there = count - j < GROUP ? count - j : GROUP;
        pack_values<K>(widened(v + j, there, s.v_dim), there, GROUP, padded, s.v_dim, s.v_groups, tiles.values + j * GROUP);
      }
    } else {
      pack_values<K>(v, count, padded, padded, s.v_dim, s.v_groups, tiles.values);
    }
  }

  // One block of keys for all rows of a task: statistics and unnormalised values into `part`, `top`, `sum`. `low`: first key seen by any row.
  void block(const Task& t, int64_t start, int64_t low, int64_t high, const Tiles<K>& tiles, float* part, float* top, float* sum) const {
    const T *k[KEYS], *v[KEYS];
    // Whole groups keep every key in the place it always has; keys before the first one seen are read as that one.
    int64_t from = start > low ? start : low / GROUP * GROUP, first = from < low ? low - from : 0;
    int64_t count = high - from, padded = (count + GROUP - 1) / GROUP * GROUP, rows = t.tokens * s.group;
    rows_of(t, from + first, high, k + first, v + first);
    for (int64_t j = 0; j < first; j++) k[j] = k[first], v[j] = v[first];
    int64_t k_bytes = s.dim * (int64_t)sizeof(T) + tail, v_bytes = s.v_dim * (int64_t)sizeof(T) + tail;
    fetch(k, 0, 2 * GROUP, count, k_bytes);
    for (int64_t j = 0; j < count; j += GROUP) {  // rows of a head are apart from each other in memory: nothing else fetches them early
      fetch(k, j + 2 * GROUP, j + 3 * GROUP, count, k_bytes);
      fetch(v, j, j + GROUP, count, v_bytes);
      pack_key_group(k, j, count - j, s, tiles);
    }
    multiply<K>(rows, padded / GROUP, tiles.q, s.dim, tiles.keys, GROUP * s.dim, s.dim, tiles.logits, KEYS, false);
    for (int64_t i = 0; i < t.tokens; i++) {
      Span seen(s.f, t.position + i, t.length);
      int64_t a = seen.low > from ? seen.low - from : 0, b = seen.high < high ? seen.high - from : count;
      for (int64_t g = 0; g < s.group; g++) {
        int64_t r = i * s.group + g;
        float slope = slopes ? slopes[t.head * s.group + g] : 0.0f;
        soften(s.f, tiles.logits + r * KEYS, tiles.weights + r * KEYS, a, b, padded, slope, (float)(t.position + i - from), top + r, sum + r);
      }
    }
    pack_all_values(v, count, padded, s, tiles);
    multiply<K>(rows, s.v_groups, tiles.weights, KEYS, tiles.values, GROUP * padded, padded, part, s.ldv(), false);
  }

  // Adds a block's result to the running one.
  void merge(int64_t rows, float* out, float* top, float* sum, const float* part, const float* part_top, const float* part_sum) const {
    for (int64_t r = 0; r < rows; r++) {
      if (part_top[r] == -INFINITY) continue;
      float peak = top[r] > part_top[r] ? top[r] : part_top[r];
      float old = expf(top[r] - peak), fresh = expf(part_top[r] - peak);
      for (int64_t d = 0; d < s.ldv(); d += W)
        store(out + r * s.ldv() + d, load(out + r * s.ldv() + d) * old + load(part + r * s.ldv() + d) * fresh);
      sum[r] = sum[r] * old + part_sum[r] * fresh;
      top[r] = peak;
    }
  }

  void begin(int64_t rows, float* out, float* top, float* sum) const {
    memset(out, 0, rows * s.ldv() * sizeof(float));
    for (int64_t r = 0; r < rows; r++) top[r] = -INFINITY, sum[r] = 0;
  }

  // Divides by the sums, sinks added, and writes the output.
  void finish(const Task& t, const float* sums, const float* top, const float* sum) const {
    for (int64_t i = 0; i < t.tokens; i++)
      for (int64_t g = 0; g < s.group; g++) {
        int64_t r = i * s.group + g, head = t.head * s.group + g;
        float total = sum[r], scale = 1.0f;
        if (sinks) {
          float peak = top[r] > sinks[head] ? top[r] : sinks[head];
          scale = expf(top[r] - peak);
          total = total * scale + expf(sinks[head] - peak);
        }
        scale = total > 0 ? scale / total : 0.0f;
        Q* to = out + ((t.first + i) * s.f->heads + head) * s.v_dim;
        for (int64_t d = 0; d < s.v_dim; d += W) store_some(to + d, load(sums + r * s.ldv() + d) * scale, s.v_dim - d);
      }
  }

  void span(const Task& t, int64_t* low, int64_t* high) const {
    *low = Span(s.f, t.position, t.length).low;
    *high = Span(s.f, t.position + t.tokens - 1, t.length).high;
  }

  void whole(const Task& t) const {
    int64_t rows = t.tokens * s.group, low, high;
    Tiles<K> tiles = carve<K>(s, rows);
    float* stats = (float*)scratch<3>(2 * rows * sizeof(float));
    load_queries(t, tiles);
    begin(rows, tiles.out, tiles.top, tiles.sum);
    span(t, &low, &high);
    for (int64_t start = low / KEYS * KEYS; start < high; start += KEYS) {
      block(t, start, low, high < start + KEYS ? high : start + KEYS, tiles, tiles.part, stats, stats + rows);
      merge(rows, tiles.out, tiles.top, tiles.sum, tiles.part, stats, stats + rows);
    }
    finish(t, tiles.out, tiles.top, tiles.sum);
  }

  // Floats that `piece` writes for one block of one task.
  int64_t piece_size(const Task& t) const { return t.tokens * s.group * (s.ldv() + 2); }

  void piece(const Task& t, int64_t start, float* result) const {
    int64_t rows = t.tokens * s.group, low, high;
    Tiles<K> tiles = carve<K>(s, rows);
    load_queries(t, tiles);
    span(t, &low, &high);
    float* top = result + rows * s.ldv();
    block(t, start, low, high < start + KEYS ? high : start + KEYS, tiles, result, top, top + rows);
  }

  void join(const Task& t, int64_t blocks, const float* pieces) const {
    int64_t rows = t.tokens * s.group;
    Tiles<K> tiles = carve<K>(s, rows);
    begin(rows, tiles.out, tiles.top, tiles.sum);
    for (int64_t b = 0; b < blocks; b++) {
      const float *part = pieces + b * piece_size(t), *top = part + rows * s.ldv();
      merge(rows, tiles.out, tiles.top, tiles.sum, part, top, top + rows);
    }
    finish(t, tiles.out, tiles.top, tiles.sum);
  }

  int64_t tokens_per_task() const { return s.group < TILE_ROWS ? TILE_ROWS / s.group : 1; }

  Task task(int64_t request, int64_t head, int64_t index) const {
    int64_t start = batch->query_start[request], end = batch->query_start[request + 1], length = batch->seq_lens[request];
    int64_t first = start + index * tokens_per_task();
    int64_t tokens = end - first < tokens_per_task() ? end - first : tokens_per_task();
    return Task{request, head, first, tokens, length - (end - first), length};
  }

  int64_t tasks_of(int64_t request) const {
    int64_t tokens = batch->query_start[request + 1] - batch->query_start[request];
    return (tokens + tokens_per_task() - 1) / tokens_per_task();
  }

  // Few tasks over many keys: blocks of keys are dealt to the threads, and joined afterwards.
  void split(int64_t request, int64_t index, int threads) const {
    Task first = task(request, 0, index);
    int64_t begin_block, blocks = blocks_of(first, &begin_block), heads = s.f->kv_heads, size = piece_size(first);
    float* pieces = (float*)scratch<4>(blocks * heads * size * sizeof(float));
    parallel(blocks * heads, threads, [&](int64_t i) {
      piece(task(request, i % heads, index), (begin_block + i / heads) * KEYS, pieces + (i % heads * blocks + i / heads) * size);
    });
    parallel(heads, threads, [&](int64_t h) { join(task(request, h, index), blocks, pieces + h * blocks * size); });
  }

  int64_t blocks_of(const Task& t, int64_t* first) const {
    int64_t low, high;
    span(t, &low, &high);
    *first = low / KEYS;
    return (high + KEYS - 1) / KEYS - *first;
  }

  // Whether that is worth it: tasks alone would leave threads without work, and what is kept between the two stays small.
  bool worth_splitting(int64_t count, int threads) const {
    if (threads <= 1 || count * s.f->kv_heads >= 4 * threads) return false;
    int64_t kept = 0, begin_block;
    for (int64_t r = 0; r < batch->rows; r++)
      for (int64_t i = 0; i < tasks_of(r); i++) {
        Task t = task(r, 0, i);
        int64_t bytes = blocks_of(t, &begin_block) * s.f->kv_heads * piece_size(t) * (int64_t)sizeof(float);
        if (t.tokens > 1 && bytes > kept) kept = bytes;
      }
    return kept <= MOST_KEPT;
  }

  // Task i of all, heads innermost. `ends`: tasks of the requests up to and with each.
  Task numbered(int64_t i, const int64_t* ends) const {
    int64_t heads = s.f->kv_heads, index = i / heads, low = 0, high = batch->rows - 1;
    while (low < high) {
      int64_t middle = (low + high) / 2;
      if (ends[middle] > index)
        high = middle;
      else
        low = middle + 1;
    }
    return task(low, i % heads, index - (low ? ends[low - 1] : 0));
  }

  void run(int64_t tokens, int threads) const {
    int64_t count = 0, rows = batch->rows, work = 0, heads = s.f->kv_heads;
    int64_t* ends = (int64_t*)scratch<5>((rows + 1) * sizeof(int64_t));
    for (int64_t r = 0; r < rows; r++) {
      count += tasks_of(r);
      ends[r] = count;
      work += tasks_of(r) * batch->seq_lens[r];
    }
    int64_t covered = rows ? batch->query_start[rows] : 0;
    memset(out + covered * s.f->heads * s.v_dim, 0, (tokens - covered) * s.f->heads * s.v_dim * sizeof(Q));
    if (count == 0) return;
    if (work * heads < 512) threads = 1;
    if (worth_splitting(count, threads)) {
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < tasks_of(r); i++) split(r, i, threads);
      return;
    }
    // The heads of a token lie side by side: where there is enough for everybody, a thread reads them all.
    int64_t run = count >= 4 * threads && decodes_only(rows) ? heads : 1;
    parallel(count * heads / run, threads, [&](int64_t part) {
      for (int64_t h = 0; h < run; h++) whole(numbered(count * heads - 1 - part * run - h, ends));  // the last tasks of a prompt are the longest
    });
  }

  bool decodes_only(int64_t rows) const {
    for (int64_t r = 0; r < rows; r++)
      if (batch->query_start[r + 1] - batch->query_start[r] > 1) return false;
    return true;
  }
};

template <class K, class Q, class T>
static void attend(const PgAttention* f, const PgBatch* batch, const PgPages* pages, const void* q, int64_t q_token, int64_t q_head,
                   int64_t tokens, void* out, const float* sinks, const float* slopes, int threads) {
  Attention<K, Q, T>{Shape(f), batch, pages, (const Q*)q, q_token, q_head, (Q*)out, sinks, slopes}.run(tokens, threads);
}

static void attention(const PgAttention* f, const PgBatch* batch, const PgPages* pages, const void* q, int64_t q_token, int64_t q_head,
                      int64_t tokens, void* out, const float* sinks, const float* slopes, int threads) {
  if (f->kv_type == PG_INT8) {
    auto run = f->type == PG_BF16 ? attend<F32, bf16, int8_t> : attend<F32, float, int8_t>;
    return run(f, batch, pages, q, q_token, q_head, tokens, out, sinks, slopes, threads);
  }
  if (f->type == PG_BF16 && f->kv_type == PG_BF16)
#if PG_DOT16
    return attend<Dot16, bf16, bf16>(f, batch, pages, q, q_token, q_head, tokens, out, sinks, slopes, threads);
#else
    return attend<F32, bf16, bf16>(f, batch, pages, q, q_token, q_head, tokens, out, sinks, slopes, threads);
#endif
  if (f->type == PG_BF16) return attend<F32, bf16, float>(f, batch, pages, q, q_token, q_head, tokens, out, sinks, slopes, threads);
  if (f->kv_type == PG_BF16) return attend<F32, float, bf16>(f, batch, pages, q, q_token, q_head, tokens, out, sinks, slopes, threads);
  attend<F32, float, float>(f, batch, pages, q, q_token, q_head, tokens, out, sinks, slopes, threads);
}

template <class Q, class T>
static void write_of(const PgAttention* f, void* pages, int64_t page_stride, int64_t token_stride, int64_t head_stride, const void* source,
                     int64_t source_token, int64_t source_head, int64_t dim, const int64_t* slots, int64_t tokens, int threads) {
  for_rows(tokens, team(tokens, f->kv_heads * dim, threads), [=](int64_t t) {
    T* place = (T*)pages + slots[t] / f->page_size * page_stride + slots[t] % f->page_size * token_stride;
    for (int64_t h = 0; h < f->kv_heads; h++) {
      const Q* from = (const Q*)source + t * source_token + h * source_head;
      if constexpr (sizeof(T) == 1)
        shrink(from, dim, place + h * head_stride);
      else
        for (int64_t d = 0; d < dim; d++) assign(place + h * head_stride + d, from[d]);
    }
  });
}

template <class Q, class T>
static void write_both(const PgAttention* f, const PgPages* p, const void* k, int64_t k_token, int64_t k_head, const void* v, int64_t v_token,
                       int64_t v_head, const int64_t* slots, int64_t tokens, int threads) {
  write_of<Q, T>(f, p->k, p->k_page, p->k_token, p->k_head, k, k_token, k_head, f->dim, slots, tokens, threads);
  write_of<Q, T>(f, p->v, p->v_page, p->v_token, p->v_head, v, v_token, v_head, f->v_dim, slots, tokens, threads);
}

static void write_kv(const PgAttention* f, const PgPages* p, const void* k, int64_t k_token, int64_t k_head, const void* v, int64_t v_token,
                     int64_t v_head, const int64_t* slots, int64_t tokens, int threads) {
  if (f->kv_type == PG_INT8) {
    auto write = f->type == PG_BF16 ? write_both<bf16, int8_t> : write_both<float, int8_t>;
    return write(f, p, k, k_token, k_head, v, v_token, v_head, slots, tokens, threads);
  }
  auto write = f->type == PG_BF16 ? (f->kv_type == PG_BF16 ? write_both<bf16, bf16> : write_both<bf16, float>)
                                  : (f->kv_type == PG_BF16 ? write_both<float, bf16> : write_both<float, float>);
  write(f, p, k, k_token, k_head, v, v_token, v_head, slots, tokens, threads);
}

}  // namespace PG_ISA
