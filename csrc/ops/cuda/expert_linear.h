// Products of experts: each row with the matrix of its own expert, for any number of rows.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "ops/activation.h"
#include "ops/cuda/expert_plan.h"

namespace bequest::cuda {

// W of all experts.
struct ExpertMatrices {
  const void* weight;     // [E, N, D], contiguous
  const float* bias;      // [E, N], or null
  int64_t out_features;   // N
  int64_t in_features;    // D
  DType dtype;            // of the weight and of rows
  bool is_fresh = false;  // the kernel ahead makes the weight: nothing of it is read before that has ended
};

// What route_experts has made.
struct ExpertChoice {
  const int32_t* ids;    // [T, K]
  const float* weights;  // [T, K]
  void* plan;
  ExpertSizes sizes;
};

// Whether tensor cores multiply bfloat16 of these sizes on this chip. Else rows are multiplied one by one.
bool has_expert_tiles(int64_t outputs, int64_t in_features);

struct ExpertGatedParams {
  const void* x;            // [T, D], contiguous
  ExpertMatrices matrices;  // of each expert the rows of the gate and then those of up
  ExpertChoice choice;
  Activation activation;
  void* out;  // [T * K, N / 2]: f(gate) * up of each pair
};

// A row's result depends on the row and its expert alone, to the bit. Rows of pairs that are in no run may be
// left as they are. REQUIRES: sizes as in route_experts;
// where they are multiples of 8, bfloat16 is aligned to 16 bytes.
void expert_gated(const ExpertGatedParams& p, Stream stream);

struct ExpertProductsParams {
  const void* x;  // [T, D] if the pairs of a token share a row, else [T * K, D]; contiguous
  ExpertMatrices matrices;
  ExpertChoice choice;
  bool shares_rows;
  void* out;  // [T * K, N]: the product of each pair
};

// As they are: for what comes between them and their activation or sum. Reads the plan, and weights by it,
// before the kernel ahead has ended. REQUIRES: the choice has been waited for by a kernel ahead.
void expert_products(const ExpertProductsParams& p, Stream stream);

struct ExpertSumParams {
  const void* products;  // [T * K, N]
  int64_t columns;       // N
  DType dtype;
  ExpertChoice choice;
  void* out;  // [T, N]: a token's products times what they count, added by rank
};

void sum_expert_products(const ExpertSumParams& p, Stream stream);

struct ExpertSummedParams {
  const void* x;  // [T * K, D], contiguous
  ExpertMatrices matrices;
  ExpertChoice choice;
  void* products;  // [T * K, N], for the products
  void* out;       // [T, N]: the products of a token times what they count, added by rank
};

// The same; products are rounded to their dtype, their sum is float32, and NaN where a pair counts NaN. Reads
// the plan, and weights by it, before the kernel ahead has ended. REQUIRES: expert_gated has been called with
// the same choice, or the choice has been waited for.
void expert_summed(const ExpertSummedParams& p, Stream stream);

}  // namespace bequest::cuda
