// From a row of logits to a token without sorting the vocabulary. Compiled for the baseline: the library's templates must not be
// shared between instruction sets. Exponentials come from the table.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "api.h"
#include "pool.h"

namespace {

float number(const void* x, int type, int64_t i) {
  if (type == PG_F32) return ((const float*)x)[i];
  uint32_t bits = (uint32_t)((const uint16_t*)x)[i] << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

uint32_t finalise(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

double uniform(int64_t seed, int64_t position) {
  uint32_t state = 0x9E3779B9u;
  for (uint32_t word : {(uint32_t)seed, (uint32_t)((uint64_t)seed >> 32), (uint32_t)position, (uint32_t)((uint64_t)position >> 32)})
    state = finalise(state ^ word);
  return finalise(state) / 4294967296.0;
}

struct Row {
  const void* logits;
  int type;
  int64_t width;
  const float* weights;
  float top;

  float logit(int64_t i) const { return number(logits, type, i); }
  // Higher logit first, lower token first among equals.
  bool before(int64_t a, int64_t b) const {
    float x = logit(a), y = logit(b);
    return x > y || (x == y && a < b);
  }
};

typedef std::vector<int64_t> Tokens;

// The first `count` of `tokens` in rank order come to the front, unsorted.
void best_first(const Row& row, Tokens& tokens, size_t count) {
  if (count < tokens.size())
    std::nth_element(tokens.begin(), tokens.begin() + count, tokens.end(), [&](int64_t a, int64_t b) { return row.before(a, b); });
}

void keep_probable(const Row& row, float min_p, Tokens& tokens) {
  // Of the highest probability, the weight is 1.
  tokens.clear();
  for (int64_t i = 0; i < row.width; i++)
    if (row.weights[i] >= min_p && row.weights[i] > 0) tokens.push_back(i);
}

// Of `tokens`, those before whose turn less than `share` of the whole was taken. Sorts only as far as that.
void keep_share(const Row& row, float share, Tokens& tokens) {
  double total = 0, taken = 0;
  for (int64_t i : tokens) total += row.weights[i];
  size_t sorted = 0;
  auto rank = [&](int64_t a, int64_t b) { return row.before(a, b); };
  for (size_t window = 64; sorted < tokens.size(); window *= 4) {
    size_t end = std::min(sorted + window, tokens.size());
    if (end < tokens.size()) std::nth_element(tokens.begin() + sorted, tokens.begin() + end, tokens.end(), rank);
    std::sort(tokens.begin() + sorted, tokens.begin() + end, rank);
    for (; sorted < end; sorted++) {
      if (sorted > 0 && taken >= share * total) return tokens.resize(sorted);
      taken += row.weights[tokens[sorted]];
    }
  }
}

int64_t draw(const Row& row, double total, double u) {
  double target = u * total, seen = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < row.width; i++) {
    if (row.weights[i] <= 0) continue;
    seen += row.weights[i], last = i;
    if (seen > target) return i;
  }
  return last;
}

int64_t draw(const Row& row, const Tokens& tokens, double u) {
  double total = 0, seen = 0;
  for (int64_t i : tokens) total += row.weights[i];
  for (int64_t i : tokens) {
    seen += row.weights[i];
    if (seen > u * total) return i;
  }
  return tokens.back();
}

int64_t filtered(const Row& row, int32_t top_k, float top_p, float min_p, double u, Tokens& tokens) {
  keep_probable(row, min_p, tokens);
  if (tokens.empty()) return 0;
  if (top_k > 0 && (size_t)top_k < tokens.size()) {
    best_first(row, tokens, top_k);
    tokens.resize(top_k);
  }
  if (top_p < 1) keep_share(row, top_p, tokens);
  std::sort(tokens.begin(), tokens.end());
  return draw(row, tokens, u);
}

}  // namespace

void pg_sample(const PgTable* table, const void* logits, int64_t stride, int type, int64_t rows, int64_t width, const int32_t* mask,
               const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p, const int64_t* seed,
               const int64_t* position, int64_t* out, bool* bad, int threads) {
  int64_t size = type == PG_F32 ? 4 : 2, words = (width + 31) / 32;
  PG_ISA::parallel(rows, threads, [&](int64_t r) {
    static thread_local std::vector<float> weights;
    static thread_local Tokens tokens;
    weights.resize(width);
    const void* row = (const char*)logits + r * stride * size;
    const int32_t* allowed = mask ? mask + r * words : nullptr;
    table->argmax(row, stride, type, 1, width, allowed, out + r, bad + r, 1);
    float top = number(row, type, out[r]);
    // Nothing to draw from: token 0, whose own logit says nothing where a mask refuses it.
    if (top == -INFINITY || (allowed && !((uint32_t)allowed[out[r] / 32] >> (out[r] & 31) & 1))) return;
    if (temperature[r] <= 0) return;
    double total = table->exp_row(row, type, width, allowed, top, 1.0f / temperature[r], weights.data());
    Row view{row, type, width, weights.data(), top};
    double u = uniform(seed[r], position[r]);
    bool plain = (top_k[r] <= 0 || top_k[r] >= width) && top_p[r] >= 1 && min_p[r] <= 0;
    out[r] = plain ? draw(view, total, u) : filtered(view, top_k[r], top_p[r], min_p[r], u, tokens);
  });
}
