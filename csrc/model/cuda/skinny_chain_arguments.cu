// The host side of skinny_chain: what its kernel is launched with.
#include <algorithm>

#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "ops/cuda/skinny_linear.cuh"

namespace bequest::cuda {
namespace chain {
namespace {

// Numbers of launches take the scratch's first bytes.
constexpr int64_t kMostBlocks = 256;
constexpr int kRowPad = 64;  // bytes: two rows that are read at once lie in different banks
constexpr int kMostSharedBytes = 226 * 1024;
constexpr int kFewestStages = 4;

// How much of the weights is on its way, and how much waits in shared memory for its rows.
struct Depth {
  int stages, in_flight;
  bool lets_next_in_early;  // or when all weights have been asked for, so that those of the next come behind
                            // them
};
// Small layers are a chain of latencies: what is asked for early comes in the way of rows of x, and a ring
// that is larger in that of attention, or of the next chain, which take their place beside it. Large ones are
// a stream.
constexpr Depth kSmallLayer{6, 2, false}, kLargeLayer{10, 3, true};
constexpr int64_t kLargeShare = 64;  // stages that a CTA has of a layer

int padded_bytes(int64_t depth) { return padded_units(static_cast<int>(depth / kUnit)) * kUnit * 2; }

Depth depth_of(const Arguments& a) {
  int64_t share = 0;
  for (int i = 0; i < a.num_phases; ++i)
    share += (a.phases[i].tiles_each + 1) * ceil_div(a.phases[i].units, kSteps);
  const Depth wish = share < kLargeShare ? kSmallLayer : kLargeLayer;
  const int beside = Places(0, a.num_tokens, a.row_pitch, a.gain_bytes).total;
  return {std::min(wish.stages, (kMostSharedBytes - beside) / kStageBytes), wish.in_flight,
          wish.lets_next_in_early};
}

Phase phase_of(const ChainProduct& product, Kind kind, int64_t grid) {
  const int64_t outputs = kind == Kind::kGate ? product.out_features / 2 : product.out_features;
  const int64_t tiles = ceil_div(outputs, kind == Kind::kGate ? kTile / 2 : kTile);
  return {.kind = kind,
          .units = static_cast<int>(product.in_features / kUnit),
          .outputs = static_cast<int>(outputs),
          .tiles_each = static_cast<int>(tiles / grid),
          .longer = static_cast<int>(tiles % grid),
          .eps = 0,
          .gain = nullptr,
          .bias = product.bias,
          .from = nullptr,
          .to = nullptr,
          .out = nullptr};
}

// The kernel's view of the params.
Arguments arguments_of(const SkinnyChainParams& p, int64_t grid) {
  const int64_t hidden = p.output.out_features, inner = p.down.in_features;
  const bool goes_on = p.next_qkv.weight != nullptr;
  auto* launches = static_cast<uint32_t*>(p.scratch);
  auto* words = reinterpret_cast<uint8_t*>(launches + kMostBlocks);
  const auto rows_of_words = [&](int64_t width) {  // [kMostChainedRows, width / 2] in sectors
    auto* rows = reinterpret_cast<Word*>(words);
    words += place_of_word(kMostChainedRows * width / 2);
    return rows;
  };
  Word *after_output = rows_of_words(hidden), *gated = rows_of_words(inner),
       *after_down = rows_of_words(hidden);
  Arguments a{};
  const ChainProduct* products[] = {&p.output, &p.gate_up, &p.down, &p.next_qkv};
  constexpr Kind kKinds[] = {Kind::kAdd, Kind::kGate, Kind::kAdd, Kind::kStore};
  a.num_phases = goes_on ? 4 : 3;
  for (int i = 0; i < a.num_phases; ++i) {
    a.weights[i] = weight_map(products[i]->weight, products[i]->out_features, products[i]->in_features,
                              kKinds[i] == Kind::kGate);
    a.phases[i] = phase_of(*products[i], kKinds[i], grid);
  }
  a.phases[0].out = a.phases[2].out = static_cast<BFloat16*>(p.residual);
  a.phases[0].to = after_output;
  a.phases[1].from = after_output;
  a.phases[1].gain = p.mlp_norm.weight;
  a.phases[1].eps = p.mlp_norm.eps;
  a.phases[1].to = gated;
  a.phases[2].from = gated;
  if (goes_on) {
    a.phases[2].to = after_down;
    a.phases[3].from = after_down;
    a.phases[3].gain = p.next_norm.weight;
    a.phases[3].eps = p.next_norm.eps;
    a.phases[3].out = static_cast<BFloat16*>(p.qkv);
    a.tap = p.tap;
  }
  a.num_tokens = p.num_tokens;
  a.row_pitch = padded_bytes(std::max({p.output.in_features, hidden, inner})) + kRowPad;
  a.gain_bytes = padded_bytes(hidden);
  const Depth depth = depth_of(a);
  a.stages = depth.stages;
  a.in_flight = depth.in_flight;
  a.lets_next_in_early = depth.lets_next_in_early;
  a.attended = p.attended;
  a.activation = p.activation;
  a.launches = launches;
  return a;
}

void check_params(const SkinnyChainParams& p) {
  const int64_t hidden = p.output.out_features, inner = p.down.in_features;
  check(p.num_tokens >= 1 && p.num_tokens <= kMostChainedRows, "skinny_chain: 1 to 4 rows");
  check(can_chain(p.output.in_features, hidden, inner), "skinny_chain: sizes");
  check(p.gate_up.in_features == hidden && p.gate_up.out_features == 2 * inner &&
            p.down.out_features == hidden &&
            (p.next_qkv.weight == nullptr || p.next_qkv.in_features == hidden),
        "skinny_chain: products that do not fit each other");
  for (const void* pointer : {p.attended, p.output.weight, p.gate_up.weight, p.down.weight, p.next_qkv.weight,
                              p.mlp_norm.weight, p.next_norm.weight, static_cast<const void*>(p.scratch)})
    check(is_aligned(pointer, 16), "skinny_chain: rows and weights are aligned to 16 bytes");
  check(in_range(p.tap) && !p.tap.store_output, "skinny_chain: tap");
}

}  // namespace
}  // namespace chain

bool can_chain(int64_t attended, int64_t hidden, int64_t inner) {
  using namespace chain;
  const auto scratch = kMostBlocks * sizeof(uint32_t) +
                       static_cast<size_t>(place_of_word(kMostChainedRows * (2 * hidden + inner) / 2));
  for (const int64_t depth : {attended, hidden, inner})
    if (depth < kUnit || depth % kUnit != 0) return false;
  const int pitch = padded_bytes(std::max({attended, hidden, inner})) + kRowPad;
  const int most = Places(kFewestStages, kMostChainedRows, pitch, padded_bytes(hidden)).total;
  return most <= kMostSharedBytes && multiprocessors() <= kMostBlocks && scratch <= kChainScratchBytes;
}

void skinny_chain(const SkinnyChainParams& p, Stream stream) {
  using namespace chain;
  check_params(p);
  const int grid = multiprocessors();
  launch_chain(arguments_of(p, grid), grid, stream);
}

}  // namespace bequest::cuda
