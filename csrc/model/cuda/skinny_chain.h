// What a layer does between its attention and the next one's, for a few rows, in one kernel:
//   residual += attended Woᵀ;  inner = f(norm(residual) Wgᵀ) * (norm(residual) Wuᵀ);
//   residual += inner Wdᵀ;     qkv = norm'(residual) Wqkvᵀ of the next layer, if there is one.
// With experts, of one row: a router chooses K of E, and inner is what these make, each times what it counts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/stream.h"
#include "ops/activation.h"
#include "ops/cuda/lora.h"
#include "ops/cuda/skinny_linear.h"
#include "ops/hidden_tap.h"

namespace bequest::cuda {

inline constexpr int kMostChainedRows = 4;
inline constexpr int kMostChainedRank = 64;  // of adapters
inline constexpr size_t kChainScratchBytes = 2 << 20;

struct ChainProduct {
  // [N, K] bfloat16, e4m3 where there are scales, or codes of 4 bits where there are groups: bytes [N, K / 2]
  // in the order that int4_to_f16 takes. With fine_codec as FineMatrices has them. Contiguous, aligned to 16
  // bytes
  const void* weight;
  const void* bias;  // [N] bfloat16, or null
  int64_t out_features;
  int64_t in_features;
  const float* scales;     // [N]: what each row of e4m3, or of fine codes, is multiplied by, or null
  const uint32_t* groups;  // [N, K / 128 filled up to a multiple of 32]: see CodeGroup; or null
  // kOffset4, kScaled8, kFloat8, plus 1: groups are [N, K / 32] words of such codes; 0: they are not
  int fine_codec;
};

// A root-mean-square norm of the residual.
struct ChainNorm {
  const void* weight;  // [H] bfloat16, aligned to 16 bytes
  float eps;
  float offset;  // is added to the weight, in float32; other than 0 with experts alone
};

// What attention's columns of a foresight are filled up to a multiple of.
inline constexpr int64_t kForesightColumns = 1024;

// Experts in place of a feed-forward layer: gate_up is [E, 2 I, H] then, down [E, H, I], without biases.
struct ChainExperts {
  ChainProduct router;  // [E, H]; weight null: there are no experts. With a shared one [E + 1, H]
  int64_t num_chosen;   // K, best first by the softmax of the router's logits
  bool renormalises;    // what they count is divided by its sum
  float factor;         // of what they count, at last
  // One that every row takes, of the size of the others; it counts the sigmoid of the router's last output.
  ChainProduct shared_up;    // [2 I, H]; weight null: there is none
  ChainProduct shared_down;  // [H, I]
  uint64_t* num_read;        // [1]: K is added to it; null: nobody counts
  // [E, A filled up with zeros + H] bfloat16, aligned to 16 bytes: what [attended | residual] is multiplied
  // with to know the router's logits, up to a factor, before the residual is; Wr diag(g) [Wo | 1]. It decides
  // what is asked for early, and no result. Null: experts are asked for when the router has spoken.
  const void* foresight;
  // The kernels before and behind are attend_token of heads of up to 128, and get room to begin beside it.
  bool beside_attention;
};

// What adapters add to the products; of a site without `a` nothing.
struct ChainDeltas {
  const int32_t* slots;  // [T]: the adapter of each token, -1: none; null: no token has one
  LoraSite output, gate_up, down, next_qkv;
};

// What of the next layer a chain does.
struct ChainNext {
  ChainNorm norm;
  ChainProduct qkv;      // [Q, H]; weight null: no layer follows, and all else means nothing
  void* out;             // [T, Q] bfloat16
  HiddenTap tap;         // of the residual before the norm; not `store_output`
  ChainProduct gate_up;  // that of its chain, which this one may ask memory for; weight null: it does not
};

struct SkinnyChainParams {
  int num_tokens;        // T
  const void* attended;  // [T, A] bfloat16, contiguous, aligned to 16 bytes
  void* residual;        // [T, H] bfloat16, contiguous; read and written
  ChainProduct output;   // [H, A]
  ChainNorm mlp_norm;
  ChainExperts experts;
  ChainProduct gate_up;  // [2 I, H], the gate's rows and then those of up
  Activation activation;
  ChainProduct down;  // [H, I]
  ChainNext next;
  void* scratch;  // [kChainScratchBytes], zero before the first launch, of one stream at a time
  ChainDeltas deltas;
};

// Whether there is a kernel for these sizes, for any T up to kMostChainedRows; bits: of a weight, 16, 8 or 4;
// fine: with scales of every 32
bool can_chain(int64_t attended, int64_t hidden, int64_t inner, int bits, bool fine);

// The same of one row and experts of this inner size.
bool can_chain_experts(int64_t attended, int64_t hidden, int64_t inner, int64_t num_experts,
                       int64_t num_chosen, bool has_shared);

// The same with adapters in slots of this rank, of products that are up to three matrices; not with experts
// or codes.
bool can_chain_deltas(int64_t attended, int64_t hidden, int64_t inner, int64_t most_rank);

// A row's result depends on the row alone, on whether there are slots, and, in codes of 4 bits in groups of
// 128, on whether it is the only one. REQUIRES: 1 <= T <= kMostChainedRows; can_chain; all weights are in one
// format; with experts T = 1, can_chain_experts, and no codes; with slots can_chain_deltas, no experts and no
// codes.
void skinny_chain(const SkinnyChainParams& p, Stream stream);

// One product by the kernel of the chain, without a norm: of codes in groups, which no other kernel
// multiplies.
struct ChainedLinearParams {
  int num_tokens;  // T
  const void* x;   // [T, K] bfloat16, contiguous, aligned to 16 bytes
  ChainProduct product;
  SkinnyResult result;
  Activation activation;  // of kGate
  void* out;              // [T, N] bfloat16; kGate: [T, N / 2]
  void* scratch;          // as that of chains, of the same stream
};

// Whether there is a kernel for rows of K values, for any T up to kMostChainedRows; bits, fine: of a weight
bool can_chain_linear(int64_t in_features, int bits, bool fine);

// REQUIRES: 1 <= T <= kMostChainedRows; can_chain_linear
void chained_linear(const ChainedLinearParams& p, Stream stream);

}  // namespace bequest::cuda
