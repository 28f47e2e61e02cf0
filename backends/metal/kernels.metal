// Norms, gated activation, rotation, cache write and paged attention for Apple GPUs, float inside. SCALAR and CACHE are replaced by the
// names of dtypes before compilation. Groups of SIZE threads; every kernel ends with its place in the grid and in the group.
#include <metal_stdlib>
using namespace metal;

#define SIZE 128
#define WIDEST 4

// All threads of a group end with the sum (or the largest) of their numbers; `shared` holds SIZE of them and is free afterwards.
#define REDUCED(value, shared, at, OPERATION)                            \
  shared[at] = value;                                                    \
  threadgroup_barrier(mem_flags::mem_threadgroup);                       \
  for (uint step = SIZE / 2; step > 0; step /= 2) {                      \
    if (at < step) shared[at] = OPERATION(shared[at], shared[at + step]); \
    threadgroup_barrier(mem_flags::mem_threadgroup);                     \
  }                                                                      \
  value = shared[0];                                                     \
  threadgroup_barrier(mem_flags::mem_threadgroup);

inline float added(float a, float b) { return a + b; }
inline float larger(float a, float b) { return a > b ? a : b; }

// A group a row. add: x + residual goes to `total` and is normed. weight: 0 none, 1 in SCALAR after the norm, 2 with `offset` before it.
kernel void rms_norm(
    device SCALAR* out, device SCALAR* total, device const SCALAR* x, device const SCALAR* residual, device const SCALAR* weight,
    constant long& inner, constant long& x_outer, constant long& x_inner, constant long& width, constant long& add,
    constant long& weighted, constant float& eps, constant float& offset,
    uint3 group [[threadgroup_position_in_grid]], uint3 lane [[thread_position_in_threadgroup]]) {
  threadgroup float shared[SIZE];
  long row = group.x, at = row * width, from = row / inner * x_outer + row % inner * x_inner;
  float sum = 0.0f;
  for (long i = lane.x; i < width; i += SIZE) {
    SCALAR value = x[from + i];
    if (add) {
      value = SCALAR(float(value) + float(residual[at + i]));
      total[at + i] = value;
    }
    sum += float(value) * float(value);
  }
  REDUCED(sum, shared, lane.x, added)
  float scale = 1.0f / sqrt(sum / float(width) + eps);
  for (long i = lane.x; i < width; i += SIZE) {
    float normed = float(add ? total[at + i] : x[from + i]) * scale;
    if (weighted == 2) normed *= float(weight[i]) + offset;
    if (weighted == 1) normed = float(SCALAR(normed)) * float(weight[i]);
    out[at + i] = SCALAR(normed);
  }
}

// A thread a number of the output. kind: 0 silu, 1 gelu_tanh, 2 relu, 3 relu2, 4 quick_gelu, 5 sigmoid, 6 tanh. limit 0: no clamp.
kernel void gated_activation(
    device SCALAR* out, device const SCALAR* x, constant long& row_stride, constant long& width, constant long& count,
    constant long& kind, constant float& limit,
    uint3 group [[threadgroup_position_in_grid]], uint3 lane [[thread_position_in_threadgroup]]) {
  long index = long(group.x) * SIZE + lane.x;
  if (index >= count) return;
  long from = index / width * row_stride + index % width;
  float gate = float(x[from]), up = float(x[from + width]);
  if (limit > 0.0f) {
    gate = min(gate, limit);
    up = max(-limit, min(up, limit));
  }
  float act = 0.0f;
  if (kind == 0) act = gate / (1.0f + exp(-gate));
  if (kind == 1) act = gate / (1.0f + exp(-2.0f * 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate)));
  if (kind == 2) act = max(gate, 0.0f);
  if (kind == 3) act = max(gate, 0.0f) * max(gate, 0.0f);
  if (kind == 4) act = gate / (1.0f + exp(-1.702f * gate));
  if (kind == 5) act = 1.0f / (1.0f + exp(-gate));
  if (kind == 6) act = precise::tanh(gate);
  out[index] = SCALAR(float(SCALAR(act)) * up);
}

// A group a token and head, heads of k after those of q; turns in place.
kernel void rope(
    device SCALAR* q, device SCALAR* k, device const float* cosines, device const float* sines, constant long& heads,
    constant long& q_token, constant long& q_head, constant long& k_token, constant long& k_head,
    constant long& cos_token, constant long& sin_token, constant long& half_dim, constant long& neox,
    uint3 group [[threadgroup_position_in_grid]], uint3 lane [[thread_position_in_threadgroup]]) {
  long token = group.x, head = group.y;
  device SCALAR* turned = head < heads ? q + token * q_token + head * q_head : k + token * k_token + (head - heads) * k_head;
  for (long i = lane.x; i < half_dim; i += SIZE) {
    long first = neox ? i : 2 * i, second = neox ? i + half_dim : 2 * i + 1;
    float c = cosines[token * cos_token + i], s = sines[token * sin_token + i];
    float a = float(turned[first]), b = float(turned[second]);
    turned[first] = SCALAR(a * c - b * s);
    turned[second] = SCALAR(b * c + a * s);
  }
}

// A group a token and KV head.
kernel void write_kv(
    device CACHE* k_pages, device CACHE* v_pages, device const SCALAR* k, device const SCALAR* v, device const long* slots,
    constant long& k_token, constant long& k_head, constant long& v_token, constant long& v_head,
    constant long& kp_page, constant long& kp_slot, constant long& kp_head,
    constant long& vp_page, constant long& vp_slot, constant long& vp_head,
    constant long& page_size, constant long& k_dim, constant long& v_dim,
    uint3 group [[threadgroup_position_in_grid]], uint3 lane [[thread_position_in_threadgroup]]) {
  long token = group.x, head = group.y, page = slots[token] / page_size, place = slots[token] % page_size;
  for (long i = lane.x; i < k_dim; i += SIZE) {
    k_pages[page * kp_page + place * kp_slot + head * kp_head + i] = CACHE(float(k[token * k_token + head * k_head + i]));
  }
  for (long i = lane.x; i < v_dim; i += SIZE) {
    v_pages[page * vp_page + place * vp_slot + head * vp_head + i] = CACHE(float(v[token * v_token + head * v_head + i]));
  }
}

// A group a query token and head; SIZE keys at a time, softmax as they come (arXiv:2205.14135). What a query sees is one run of keys.
// window, chunk and softcap 0: none. flags: 1 causal, 2 sinks, 4 slopes, and eight times how many distances have a bias.
kernel void paged_attention(
    device SCALAR* out, device const SCALAR* q, device const CACHE* k_pages, device const CACHE* v_pages,
    device const int* query_start, device const int* seq_lens, device const int* table,
    device const float* sinks, device const float* slopes, device const float* bias,
    constant long& requests, constant long& width, constant long& heads, constant long& shared_by, constant long& dim, constant long& v_dim,
    constant long& page_size, constant long& window, constant long& chunk, constant long& flags,
    constant long& q_token, constant long& q_head, constant long& kp_page, constant long& kp_slot, constant long& kp_head,
    constant long& vp_page, constant long& vp_slot, constant long& vp_head, constant float& scale, constant float& softcap,
    uint3 group [[threadgroup_position_in_grid]], uint3 lane [[thread_position_in_threadgroup]]) {
  threadgroup float query[SIZE * WIDEST];
  threadgroup float shared[SIZE];
  threadgroup float weights[SIZE];
  threadgroup long places[SIZE];
  long token = group.x, head = group.y, kv_head = head / shared_by, at = lane.x, biases = flags / 8;

  long low = 0, high = requests - 1;  // the first request that ends behind the token
  while (low < high) {
    long middle = (low + high) / 2;
    if (query_start[middle + 1] > token) high = middle;
    else low = middle + 1;
  }
  long length = seq_lens[low], behind = query_start[low + 1] - token;
  long position = max(length - max(behind, 1L), 0L);
  long first = window ? max(position - window + 1, 0L) : 0L, end = flags & 1 ? min(position + 1, length) : length;
  if (chunk) {
    first = max(first, position / chunk * chunk);
    end = min(end, (position / chunk + 1) * chunk);
  }

  for (long i = at; i < dim; i += SIZE) query[i] = float(q[token * q_token + head * q_head + i]);
  float largest = flags & 2 ? sinks[head] : -INFINITY, sum = flags & 2 ? 1.0f : 0.0f;
  float result[WIDEST] = {0.0f, 0.0f, 0.0f, 0.0f};
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (long start = first; start < end; start += SIZE) {
    long key = start + at;
    float logit = -INFINITY;
    if (key < end) {
      long page = table[low * width + key / page_size], place = key % page_size;
      device const CACHE* numbers = k_pages + page * kp_page + place * kp_slot + kv_head * kp_head;
      places[at] = page * vp_page + place * vp_slot + kv_head * vp_head;
      float product = 0.0f;
      for (long i = 0; i < dim; ++i) product += query[i] * float(numbers[i]);
      logit = product * scale;
      if (softcap > 0.0f) logit = softcap * precise::tanh(logit / softcap);
      if (flags & 4) logit -= slopes[head] * float(position - key);
      if (biases) logit += bias[head * biases + max(0L, min(position - key, biases - 1))];
    }
    float top = logit;
    REDUCED(top, shared, lane.x, larger)
    top = larger(top, largest);
    float kept = largest == -INFINITY ? 0.0f : exp(largest - top), weight = logit == -INFINITY ? 0.0f : exp(logit - top);
    weights[at] = weight;
    REDUCED(weight, shared, lane.x, added)
    sum = sum * kept + weight;
    largest = top;
    long count = min(end - start, long(SIZE));
    for (long part = 0; part < WIDEST; ++part) {
      long i = part * SIZE + at;
      if (i >= v_dim) break;
      float value = result[part] * kept;
      for (long j = 0; j < count; ++j) value += weights[j] * float(v_pages[places[j] + i]);
      result[part] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (long part = 0; part < WIDEST; ++part) {
    long i = part * SIZE + at;
    if (i < v_dim) out[(token * heads + head) * v_dim + i] = SCALAR(sum > 0.0f ? result[part] / sum : 0.0f);
  }
}
