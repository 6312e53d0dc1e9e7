// The host side of skinny_chain: what its kernel is launched with.
#include <algorithm>
#include <initializer_list>

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

int stage_units(bool in_codes) { return in_codes ? kStageUnits<true> : kStageUnits<false>; }

int chunks_of(int64_t depth, bool in_codes) {
  return static_cast<int>(ceil_div(depth / kUnit, stage_units(in_codes)));
}

// Of a row of x, filled up to whole stages.
int padded_bytes(int chunks, bool in_codes) { return chunks * stage_units(in_codes) * kUnit * 2; }

Depth depth_of(const Arguments& a) {
  int64_t share = 0;
  for (int i = 0; i < a.num_phases; ++i) share += (a.phases[i].tiles_each + 1) * a.phases[i].chunks;
  const Depth wish = share < kLargeShare && a.num_experts == 0 ? kSmallLayer : kLargeLayer;
  const int beside = Places(0, a.num_tokens, a.row_pitch, a.gain_bytes).total;
  return {std::min(wish.stages, (kMostSharedBytes - beside) / kStageBytes), wish.in_flight,
          wish.lets_next_in_early};
}

int64_t num_routed(const ChainExperts& experts) {
  return experts.router.out_features - (experts.shared_up.weight != nullptr ? 1 : 0);
}

// The kernel's view of the params, put together product by product.
class Builder {
 public:
  Builder(const SkinnyChainParams& p, int64_t grid)
      : experts_(p.experts), grid_(grid), words_(static_cast<uint8_t*>(p.scratch)) {
    a.launches = static_cast<uint32_t*>(p.scratch);
    words_ += kMostBlocks * sizeof(uint32_t);
  }

  // [kMostChainedRows, width / 2] in sectors
  Word* rows_of_words(int64_t width) {
    auto* rows = reinterpret_cast<Word*>(words_);
    words_ += place_of_word(kMostChainedRows * width / 2);
    return rows;
  }

  Phase& add(const ChainProduct& product, Kind kind) {
    const bool gated = kind == Kind::kGate, in_codes = product.scales != nullptr;
    // Two codes lie where one number does.
    a.weights[a.num_phases] =
        weight_map(product.weight, product.out_features, product.in_features / (in_codes ? 2 : 1), gated);
    return add_phase({.kind = kind,
                      .units = static_cast<int>(product.in_features / kUnit),
                      .chunks = chunks_of(product.in_features, in_codes),
                      .stride = kSteps,
                      .outputs = static_cast<int>(product.out_features / (gated ? 2 : 1)),
                      .bias = product.bias,
                      .scales = product.scales});
  }

  // Of the chosen experts: gate and up give the outputs of all of them, down takes these.
  Phase& add_of_experts(const ChainProduct& product, Kind kind) {
    const bool gated = kind == Kind::kGate;
    const ChainProduct& shared = gated ? experts_.shared_up : experts_.shared_down;
    const int ranks = static_cast<int>(experts_.num_chosen) + (shared.weight != nullptr ? 1 : 0);
    a.weights[a.num_phases] = expert_weight_map(product.weight, num_routed(experts_), product.out_features,
                                                product.in_features, gated);
    if (shared.weight != nullptr)
      a.shared[gated ? 0 : 1] = weight_map(shared.weight, shared.out_features, shared.in_features, gated);
    const int units = static_cast<int>(product.in_features / kUnit);
    const int outputs = static_cast<int>(product.out_features / (gated ? 2 : 1));
    return add_phase({.kind = kind,
                      .units = gated ? units : ranks * units,
                      .chunks = gated ? static_cast<int>(ceil_div(units, kSteps)) : ranks,
                      .stride = gated ? kSteps : units,
                      .outputs = gated ? ranks * outputs : outputs,
                      .part = outputs});
  }

  Arguments a{};

 private:
  Phase& add_phase(Phase phase) {
    const int64_t tiles = ceil_div(phase.outputs, phase.kind == Kind::kGate ? kTile / 2 : kTile);
    phase.tiles_each = static_cast<int>(tiles / grid_);
    phase.longer = static_cast<int>(tiles % grid_);
    a.phases[a.num_phases] = phase;
    return a.phases[a.num_phases++];
  }

  const ChainExperts& experts_;
  const int64_t grid_;
  uint8_t* words_;
};

void norm_from(Phase& phase, const ChainNorm& norm, const Word* from) {
  phase.from = from;
  phase.gain = norm.weight;
  phase.eps = norm.eps;
  phase.offset = norm.offset;
}

void add_feed_forward(Builder& builder, const SkinnyChainParams& p, const Word* from) {
  const bool has_experts = p.experts.router.weight != nullptr;
  Arguments& a = builder.a;
  if (has_experts) {
    Phase& router = builder.add(p.experts.router, Kind::kStore);
    norm_from(router, p.mlp_norm, from);
    a.logits = router.to = builder.rows_of_words(router.outputs);
    a.num_experts = static_cast<int>(num_routed(p.experts));
    a.has_shared = p.experts.shared_up.weight != nullptr;
    a.num_chosen = static_cast<int>(p.experts.num_chosen);
    a.renormalises = p.experts.renormalises;
    a.factor = p.experts.factor;
  }
  Phase& gate =
      has_experts ? builder.add_of_experts(p.gate_up, Kind::kGate) : builder.add(p.gate_up, Kind::kGate);
  norm_from(gate, p.mlp_norm, from);
  gate.to = builder.rows_of_words(gate.outputs);
  Phase& down = has_experts ? builder.add_of_experts(p.down, Kind::kAdd) : builder.add(p.down, Kind::kAdd);
  down.from = gate.to;
  down.out = static_cast<BFloat16*>(p.residual);
}

Arguments arguments_of(const SkinnyChainParams& p, int64_t grid) {
  const int64_t hidden = p.output.out_features;
  const bool in_codes = p.output.scales != nullptr;
  Builder builder(p, grid);
  Arguments& a = builder.a;
  Phase& output = builder.add(p.output, Kind::kAdd);
  output.out = static_cast<BFloat16*>(p.residual);
  output.to = builder.rows_of_words(hidden);
  add_feed_forward(builder, p, output.to);
  if (p.next_qkv.weight != nullptr) {
    Phase& down = a.phases[a.num_phases - 1];
    down.to = builder.rows_of_words(hidden);
    Phase& next = builder.add(p.next_qkv, Kind::kStore);
    norm_from(next, p.next_norm, down.to);
    next.out = static_cast<BFloat16*>(p.qkv);
    a.tap = p.tap;
  }
  a.num_tokens = p.num_tokens;
  for (int i = 0; i < a.num_phases; ++i)
    a.row_pitch = std::max(a.row_pitch, padded_bytes(a.phases[i].chunks, in_codes) + kRowPad);
  a.gain_bytes = padded_bytes(chunks_of(hidden, in_codes), in_codes);
  const Depth depth = depth_of(a);
  a.stages = depth.stages;
  a.in_flight = depth.in_flight;
  a.lets_next_in_early = depth.lets_next_in_early;
  a.attended = p.attended;
  a.activation = p.activation;
  return a;
}

void check_params(const SkinnyChainParams& p) {
  const ChainExperts& experts = p.experts;
  const int64_t attended = p.output.in_features, hidden = p.output.out_features, inner = p.down.in_features;
  if (experts.router.weight != nullptr) {
    const bool has_shared = experts.shared_up.weight != nullptr;
    check(p.num_tokens == 1 && p.output.scales == nullptr,
          "skinny_chain: experts are chained for one row, in numbers");
    check(can_chain_experts(attended, hidden, inner, num_routed(experts), experts.num_chosen, has_shared),
          "skinny_chain: experts");
    check(experts.router.in_features == hidden && p.gate_up.bias == nullptr && p.down.bias == nullptr &&
              experts.shared_up.bias == nullptr && experts.shared_down.bias == nullptr,
          "skinny_chain: a router that does not fit, or experts with biases");
    check(!has_shared ||
              (experts.shared_up.in_features == hidden && experts.shared_up.out_features == 2 * inner &&
               experts.shared_down.in_features == inner && experts.shared_down.out_features == hidden &&
               experts.shared_down.weight != nullptr),
          "skinny_chain: a shared expert of another size");
  } else {
    check(p.num_tokens >= 1 && p.num_tokens <= kMostChainedRows, "skinny_chain: 1 to 4 rows");
    check(can_chain(attended, hidden, inner, p.output.scales != nullptr), "skinny_chain: sizes");
    check(p.mlp_norm.offset == 0 && p.next_norm.offset == 0, "skinny_chain: offsets of norms");
  }
  for (const ChainProduct* product : {&experts.router, &p.gate_up, &p.down, &p.next_qkv})
    check(product->weight == nullptr || (product->scales == nullptr) == (p.output.scales == nullptr),
          "skinny_chain: some weights are in codes and some are not");
  check(p.gate_up.in_features == hidden && p.gate_up.out_features == 2 * inner &&
            p.down.out_features == hidden &&
            (p.next_qkv.weight == nullptr || p.next_qkv.in_features == hidden),
        "skinny_chain: products that do not fit each other");
  for (const void* pointer :
       {p.attended, p.output.weight, p.gate_up.weight, p.down.weight, p.next_qkv.weight, p.mlp_norm.weight,
        p.next_norm.weight, experts.router.weight, experts.shared_up.weight, experts.shared_down.weight,
        static_cast<const void*>(p.scratch)})
    check(is_aligned(pointer, 16), "skinny_chain: rows and weights are aligned to 16 bytes");
  check(in_range(p.tap) && !p.tap.store_output, "skinny_chain: tap");
}

}  // namespace
}  // namespace chain

namespace {

// depths: of the products; widths: of what they leave for each other, of all experts together
bool has_room(std::initializer_list<int64_t> depths, std::initializer_list<int64_t> widths, int64_t longest,
              int64_t hidden, int num_tokens, bool in_codes) {
  using namespace chain;
  for (const int64_t depth : depths)
    if (depth < kUnit || depth % (in_codes ? 2 * kUnit : kUnit) != 0) return false;
  size_t scratch = kMostBlocks * sizeof(uint32_t);
  for (const int64_t width : widths)
    scratch += static_cast<size_t>(place_of_word(kMostChainedRows * width / 2));
  const int row = padded_bytes(chunks_of(longest, in_codes), in_codes),
            gain = padded_bytes(chunks_of(hidden, in_codes), in_codes);
  const int most = Places(kFewestStages, num_tokens, row + kRowPad, gain).total;
  return most <= kMostSharedBytes && multiprocessors() <= kMostBlocks && scratch <= kChainScratchBytes;
}

}  // namespace

bool can_chain(int64_t attended, int64_t hidden, int64_t inner, bool in_codes) {
  return has_room({attended, hidden, inner}, {hidden, inner, hidden}, std::max({attended, hidden, inner}),
                  hidden, kMostChainedRows, in_codes);
}

bool can_chain_experts(int64_t attended, int64_t hidden, int64_t inner, int64_t num_experts,
                       int64_t num_chosen, bool has_shared) {
  using namespace chain;
  if (num_chosen < 1 || num_chosen > std::min<int64_t>(kMostRanks, num_experts)) return false;
  if (num_experts > kMostRouted || num_experts % 4 != 0 || inner > kStageDepth) return false;
  const int64_t ranks = num_chosen + (has_shared ? 1 : 0), logits = num_experts + (has_shared ? 1 : 0);
  return has_room({attended, hidden, inner}, {hidden, logits, ranks * inner, hidden},
                  std::max({attended, hidden, ranks * kStageDepth}), hidden, 1, false);
}

void skinny_chain(const SkinnyChainParams& p, Stream stream) {
  using namespace chain;
  check_params(p);
  const int grid = multiprocessors();
  launch_chain(arguments_of(p, grid), p.output.scales != nullptr, grid, stream);
}

}  // namespace bequest::cuda
