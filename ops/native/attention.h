// Attention over pages (arXiv:2309.06180) for a ragged batch, by tiles with running softmax statistics (arXiv:2205.14135).
//
// A task is some query tokens of one request and all query heads of one KV head, so that K and V are read once per group of heads.
// Keys go by in blocks of 256 at fixed positions; a block gives each row its own maximum, sum and values, and blocks are merged in
// order. A row's result therefore depends neither on the batch nor on how the prompt was cut, nor on which threads took part.
#pragma once

#include "api.h"
#include "attention_few.h"
#include "attention_int.h"
#include "attention_pack.h"
#include "microkernel.h"
#include "pointwise.h"
#include "scratch.h"

namespace PG_ISA {

constexpr int64_t KEYS = 256;      // keys of a block
constexpr int64_t TILE_ROWS = 96;  // rows (tokens times heads of a group) of a task
constexpr int64_t INT_TILE_ROWS = 192;  // of one that is computed in integers, in prompts of
constexpr int64_t LONG_PROMPT = 384;    // tokens and more
constexpr int64_t INT_ROWS = 24;        // rows from which that pays
constexpr int64_t MOST_KEPT = 8 << 20;  // bytes of blocks' results that wait to be joined

// Query, key and value as the products want them: bfloat16 pairs where the machine multiplies those and both sides are, else float32.
template <class K>
struct Tiles {
  typedef typename K::A E;
  E *q, *keys, *values, *weights;
  float *logits, *part, *out, *top, *sum;
#if PG_DOT8
  IntTiles ints;
#endif
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

  // Memory for a task, its queries in place.
  Tiles<K> prepare(const Task& t) const {
    int64_t rows = t.tokens * s.group;
    Tiles<K> tiles = carve<K>(s, rows);
#if PG_DOT8
    if (integers(rows)) {
      tiles.ints = carve_int(rows, s.dim, s.v_groups, KEYS);
      for (int64_t r = 0; r < rows; r++) {
        const Q* from = q + (t.first + r / s.group) * q_token + (t.head * s.group + r % s.group) * q_head;
        int_row(from, s.dim, tiles.ints.q.x + r * tiles.ints.q.spans * SPAN, tiles.ints.q.scale + r * tiles.ints.q.spans);
      }
      return tiles;
    }
#endif
#if PG_FEW
    if (few(rows)) {
      for (int64_t r = 0; r < rows; r++) {
        const Q* from = q + (t.first + r / s.group) * q_token + (t.head * s.group + r % s.group) * q_head;
        for (int64_t d = 0; d < s.dim; d++) assign((float*)tiles.keys + r * s.dim + d, from[d]);  // keys are not packed: their place is free
      }
      return tiles;
    }
#endif
    load_queries(t, tiles);
    return tiles;
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
#if PG_DOT8
    if (integers(rows)) return int_block(t, from, high, k, v, tiles, part, top, sum);
#endif
#if PG_FEW
    if (few(rows)) return few_block(t, from, high, k, v, tiles, part, top, sum);
#endif
    each_group(k, v, count, [&](int64_t j) { pack_key_group(k, j, count - j, s, tiles); });
    multiply<K>(rows, padded / GROUP, tiles.q, s.dim, tiles.keys, GROUP * s.dim, s.dim, tiles.logits, KEYS, false);
    each_row(t, from, high, [&](int64_t r, int64_t a, int64_t b, float slope, float far) {
      soften(s.f, tiles.logits + r * KEYS, tiles.weights + r * KEYS, a, b, padded, slope, far, top + r, sum + r);
    });
    pack_all_values(v, count, padded, s, tiles);
    multiply<K>(rows, s.v_groups, tiles.weights, KEYS, tiles.values, GROUP * padded, padded, part, s.ldv(), false);
  }

  // do(j) for each group of 32 keys. Rows of a head are apart from each other in memory: nothing else fetches them early.
  template <class F>
  void each_group(const T* const* k, const T* const* v, int64_t count, F body) const {
    int64_t k_bytes = s.dim * (int64_t)sizeof(T) + tail, v_bytes = s.v_dim * (int64_t)sizeof(T) + tail;
    fetch(k, 0, 2 * GROUP, count, k_bytes);
    for (int64_t j = 0; j < count; j += GROUP) {
      fetch(k, j + 2 * GROUP, j + 3 * GROUP, count, k_bytes);
      fetch(v, j, j + GROUP, count, v_bytes);
      body(j);
    }
  }

  // do(row, first key, last key, slope, distance of key 0) for all rows of a task, keys counted from `from`.
  template <class F>
  void each_row(const Task& t, int64_t from, int64_t high, F body) const {
    for (int64_t i = 0; i < t.tokens; i++) {
      Span seen(s.f, t.position + i, t.length);
      int64_t a = seen.low > from ? seen.low - from : 0, b = (seen.high < high ? seen.high : high) - from;
      for (int64_t g = 0; g < s.group; g++)
        body(i * s.group + g, a, b, slopes ? slopes[t.head * s.group + g] : 0.0f, (float)(t.position + i - from));
    }
  }

#if PG_FEW
  // Whether a task with so many rows multiplies keys and values where they lie.
  bool few(int64_t rows) const { return s.f->any_order && rows <= FEW_QUERIES && s.dim % W == 0 && s.v_dim % W == 0; }

  void few_block(const Task& t, int64_t from, int64_t high, const T* const* k, const T* const* v, const Tiles<K>& tiles, float* part, float* top,
                 float* sum) const {
    int64_t count = high - from, padded = (count + GROUP - 1) / GROUP * GROUP;
    const float* queries = (const float*)tiles.keys;
    with_rows(t.tokens * s.group, [&](auto rows) {
      each_group(k, v, count, [&](int64_t j) {
        int64_t some = count - j < GROUP ? count - j : GROUP;
        if constexpr (sizeof(T) == 1)
          few_logits<rows>(queries, s.dim, widened(k + j, some, s.dim), some, tiles.logits + j, KEYS);
        else
          few_logits<rows>(queries, s.dim, k + j, some, tiles.logits + j, KEYS);
      });
      each_row(t, from, high, [&](int64_t r, int64_t a, int64_t b, float slope, float far) {
        float* logits = tiles.logits + r * KEYS;
        soften(s.f, logits, logits, a, b, padded, slope, far, top + r, sum + r);
      });
      for (int64_t r = 0; r < rows; r++) memset(part + r * s.ldv() + s.v_dim, 0, (s.ldv() - s.v_dim) * sizeof(float));
      if constexpr (sizeof(T) == 1)
        for (int64_t j = 0; j < count; j += GROUP) {
          int64_t some = count - j < GROUP ? count - j : GROUP;
          few_values<rows>(tiles.logits + j, KEYS, widened(v + j, some, s.v_dim), some, s.v_dim, part, s.ldv(), j > 0);
        }
      else
        few_values<rows>(tiles.logits, KEYS, v, count, s.v_dim, part, s.ldv(), false);
    });
  }
#endif

#if PG_DOT8
  // Whether a task with so many rows is computed in integers.
  bool integers(int64_t rows) const { return s.f->any_order && rows >= INT_ROWS && !(K::STEP == 2); }

  void int_block(const Task& t, int64_t from, int64_t high, const T* const* k, const T* const* v, const Tiles<K>& tiles, float* part, float* top,
                 float* sum) const {
    int64_t count = high - from, padded = (count + SPAN - 1) / SPAN * SPAN, rows = t.tokens * s.group, spans = tiles.ints.q.spans;
    const IntTiles& to = tiles.ints;
    auto none = [](int64_t, int64_t) {};
    each_group(k, v, count, [&](int64_t j) {
      IntPanel panel{to.keys.w + j * spans * SPAN, to.keys.scale + j * spans};
      int64_t some = count - j < GROUP ? count - j : GROUP;
      if constexpr (sizeof(T) == 1)
        int_keys(widened(k + j, some, s.dim), some, s.dim, panel);
      else
        int_keys(k + j, some, s.dim, panel);
      int_multiply(to.q, rows, 0, panel, spans, tiles.logits + j, KEYS, false, none);
    });
    each_row(t, from, high, [&](int64_t r, int64_t a, int64_t b, float slope, float far) {
      soften_int(s.f, tiles.logits + r * KEYS, to.weights.x + r * KEYS, a, b, padded, slope, far, top + r, sum + r);
    });
    for (int64_t g = 0; g < s.v_groups; g++) {
      IntPanel panel = to.values;
      for (int64_t j = 0; j < count; j += SPAN, panel.w += SPAN * GROUP, panel.scale += GROUP) {
        int64_t some = count - j < SPAN ? count - j : SPAN;
        int_values(v + j, some, g * GROUP, s.v_dim, panel);
      }
      int_multiply(to.weights, rows, 0, to.values, padded / SPAN, part + g * GROUP, s.ldv(), false, none);
    }
  }
#endif

  // Adds a block's result to the running one.
  void merge(int64_t rows, float* out, float* top, float* sum, const float* part, const float* part_top, const float* part_sum) const {
    for (int64_t r = 0; r < rows; r++) {
      if (part_top[r] == -INFINITY) continue;
      float peak = top[r] > part_top[r] ? top[r] : part_top[r];
      float old = top[r] == peak ? 1.0f : expf(top[r] - peak), fresh = part_top[r] == peak ? 1.0f : expf(part_top[r] - peak);
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
    Tiles<K> tiles = prepare(t);
    float* stats = (float*)scratch<3>(2 * rows * sizeof(float));
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
    Tiles<K> tiles = prepare(t);
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

  // Of a request with so many tokens: larger where enough tasks are left for everybody.
  int64_t tokens_per_task(int64_t tokens) const {
    int64_t most = s.f->any_order && tokens >= LONG_PROMPT ? INT_TILE_ROWS : TILE_ROWS;
    return s.group < most ? most / s.group : 1;
  }

  Task task(int64_t request, int64_t head, int64_t index) const {
    int64_t start = batch->query_start[request], end = batch->query_start[request + 1], length = batch->seq_lens[request];
    int64_t most = tokens_per_task(end - start), first = start + index * most, tokens = end - first < most ? end - first : most;
    return Task{request, head, first, tokens, length - (end - first), length};
  }

  int64_t tasks_of(int64_t request) const {
    int64_t tokens = batch->query_start[request + 1] - batch->query_start[request];
    int64_t most = tokens_per_task(tokens);
    return (tokens + most - 1) / most;
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
