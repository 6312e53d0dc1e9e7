// The choice of experts: the K best of E for each token, what each counts, and the plan of the products.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "ops/cuda/expert_plan.h"

namespace bequest::cuda {

enum class ExpertScoring { kSoftmax, kSigmoid };  // over a token's logits, or of each

struct ExpertRouting {
  ExpertScoring scoring;
  const float* bias;  // [E], on scores while experts are chosen, not in what they count; null: none
  int num_groups;     // of E / num_groups experts that follow each other
  int top_groups;     // experts of the others cannot be chosen, while there are any in these
  int group_best;     // 1 or 2: so many of a group's best scores add up to its own
  bool renormalises;  // what a token's experts count is divided by its sum
  float factor;       // of what they count, at last
};

struct RouteParams {
  const void* logits;  // [T, E]
  DType dtype;
  ExpertSizes sizes;
  ExpertRouting routing;
  int32_t* ids;                  // [T, K], best first; of equal ones the smaller comes first
  float* weights;                // [T, K]
  void* plan;                    // expert_plan_bytes, aligned to 16
  uint64_t* num_read = nullptr;  // [1]: the experts that any token takes are added to it; null: nobody counts
};

// NaN is worse than everything else, so ids are always experts. REQUIRES: 1 <= K <= E, K <= kMostChosen,
// E <= kMostExperts; num_groups divides E and is at most 32.
void route_experts(const RouteParams& p, Stream stream);

}  // namespace bequest::cuda
