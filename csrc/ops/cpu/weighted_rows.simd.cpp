#include "ops/cpu/weighted_rows.h"

#include "core/simd.h"
#include "core/threads.h"

namespace bequest::BEQUEST_ISA {
namespace {

struct Token {
  const WeightedRowsParams& p;
  int64_t number;

  const float* row(int64_t k) const {
    const int64_t at = number * p.per_token + k;
    return p.rows + (p.places == nullptr ? at : p.places[at]) * p.width;
  }
  float weight(int64_t k) const { return p.weights[number * p.per_token + k]; }
  float* out() const { return p.out + number * p.width; }
};

// `Value` is a vector or a number: a * b + c is one multiply-add of either.
template <class Value, class Load, class Store>
void add_at(const Token& token, int64_t column, Load load_at, Store store_at) {
  Value sum = token.p.adds ? load_at(token.out() + column) : Value{};
  for (int64_t k = 0; k < token.p.per_token; ++k)
    sum = load_at(token.row(k) + column) * token.weight(k) + sum;
  store_at(token.out() + column, sum);
}

void add_rows(const Token& token) {
  int64_t i = 0;
  for (; i + kLanes <= token.p.width; i += kLanes)
    add_at<VecF>(token, i, [](const float* at) { return load(at); }, [](float* at, VecF v) { store(at, v); });
  for (; i < token.p.width; ++i)
    add_at<float>(token, i, [](const float* at) { return *at; }, [](float* at, float v) { *at = v; });
}

}  // namespace

void add_weighted_rows(const WeightedRowsParams& p) {
  parallel_for(p.num_tokens, 1 + 16384 / (p.width * p.per_token), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) add_rows({p, token});
  });
}

void make_gates(const float* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float lanes[kLanes] = {x[i]};
    store(lanes, 1.0f / (exp(-load(lanes)) + 1.0f));
    out[i] = x[i] == x[i] ? lanes[0] : x[i];  // exp takes NaN for a number
  }
}

}  // namespace bequest::BEQUEST_ISA
