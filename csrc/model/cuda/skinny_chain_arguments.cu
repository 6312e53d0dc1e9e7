// The host side of skinny_chain: what its kernel is launched with.
#include <algorithm>
#include <initializer_list>

#include "attention/cuda/single_token.h"
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_deltas.cuh"
#include "ops/cuda/fine_codes.h"
#include "ops/cuda/skinny_linear.cuh"

namespace bequest::cuda {
namespace chain {
namespace {

// Numbers of launches take the scratch's first bytes.
constexpr int64_t kMostBlocks = 256;
constexpr int64_t kDeltaWords = kMostChainedRows * kTokenShrunk;  // of a phase
constexpr int kRowPad = 64;  // bytes: two rows that are read at once lie in different banks
constexpr int kMostSharedBytes = 227 * 1024;
constexpr int kReservedBytes = 1024;  // by the system, of each CTA
// What a multiprocessor has left beside the attention of a single token.
constexpr int kBesideAttention = 228 * 1024 - kSingleTokenBytes - 2 * kReservedBytes;
constexpr int kFewestBesideAttention = 6;  // stages: a smaller ring costs more than an early start gains
// A stage of codes of 4 bits has as many values as four of numbers.
constexpr int fewest_stages(Form form) { return packed(form) == 4 ? 3 : 4; }

// How much of the weights is on its way, and how much waits in shared memory for its rows.
struct Depth {
  int stages;
  int in_advance;            // of the first ring, while the kernel ahead still runs; with experts
  int in_flight, in_stream;  // where rows of x may be on their way, and where none are
  bool lets_next_in_early;   // or when all weights have been asked for, so that those of the next come behind
                             // them
};
// Small layers are a chain of latencies: what is asked for early comes in the way of rows of x, and a ring
// that is larger in that of attention, or of the next chain, which take their place beside it. Large ones are
// a stream.
constexpr Depth kSmallLayer{6, 2, 2, 2, false}, kLargeLayer{10, 3, 3, 3, true}, kExperts{11, 2, 3, 5, true};
// A ring with less room than it could use is full sooner where rows of x are waited for.
constexpr Depth kExpertsBesideAttention{11, 2, 2, 5, true};
constexpr int64_t kLargeShare = 64;  // stages that a CTA has of a layer
// Codes are multiplied faster than they come, and wait for rows of x more than numbers do.
constexpr Depth kLargeFloat8{10, 2, 2, 3, true};
// Those of 4 bits in groups of 128 are a stream from fewer stages on, which have four times the values.
constexpr Depth kLargeInt4{11, 2, 2, 3, true};
constexpr int64_t kLargeInt4Share = 32;

Form form_of_codec(FineCodec codec) {
  check(codec == FineCodec::kOffset4 || codec == FineCodec::kScaled8 || codec == FineCodec::kFloat8,
        "skinny_chain: codes that are not chained");
  if (codec == FineCodec::kOffset4) return Form::kFine4;
  return codec == FineCodec::kScaled8 ? Form::kFine8 : Form::kFineFloat8;
}

Form form_of(const ChainProduct& product) {
  if (product.fine_codec != 0) return form_of_codec(static_cast<FineCodec>(product.fine_codec - 1));
  if (product.groups != nullptr) return Form::kInt4;
  return product.scales != nullptr ? Form::kFloat8 : Form::kNumbers;
}

int bits_of(Form form) { return 16 / packed(form); }
Form form_of_bits(int bits, bool fine) {
  if (fine) return bits == 4 ? Form::kFine4 : Form::kFine8;
  return bits == 16 ? Form::kNumbers : bits == 8 ? Form::kFloat8 : Form::kInt4;
}

int chunks_of(int64_t depth, Form form) {
  return static_cast<int>(ceil_div(depth / kUnit, stage_units(form)));
}

// Of a row of x, filled up to whole stages.
int padded_bytes(int chunks, Form form) { return chunks * stage_units(form) * kUnit * 2; }

Depth wished_depth(const Arguments& a, Form form) {
  if (a.num_experts > 0) return kExperts;
  int64_t share = 0;
  for (int i = 0; i < a.num_phases; ++i) share += (a.phases[i].tiles_each + 1) * a.phases[i].chunks;
  if (form == Form::kInt4) return share < kLargeInt4Share ? kSmallLayer : kLargeInt4;
  if (share < kLargeShare) return kSmallLayer;
  return form == Form::kFloat8 ? kLargeFloat8 : kLargeLayer;
}

Depth depth_of(const Arguments& a, Form form, bool beside_attention) {
  const int other = Places(form, 0, a.num_tokens, a.row_pitch, a.gain_bytes, a.delta_bytes).total;
  const int most = (kMostSharedBytes - other) / ring_bytes(form);
  const int beside = (kBesideAttention - other) / ring_bytes(form);
  const bool leaves_room = beside_attention && beside >= kFewestBesideAttention;
  const Depth wish = leaves_room ? kExpertsBesideAttention : wished_depth(a, form);
  const int stages = std::min(wish.stages, leaves_room ? beside : most);
  return {stages, std::min(wish.in_advance, stages), std::min(wish.in_flight, stages),
          std::min(wish.in_stream, stages), wish.lets_next_in_early};
}

int64_t num_routed(const ChainExperts& experts) {
  return experts.router.out_features - (experts.shared_up.weight != nullptr ? 1 : 0);
}

// Stages of a row of [attended | residual], each filled up.
int foresight_chunks(int64_t attended, int64_t hidden) {
  return chunks_of(attended, Form::kNumbers) + chunks_of(hidden, Form::kNumbers);
}

// The kernel's view of the params, put together product by product.
class Builder {
 public:
  Builder(void* scratch, int64_t grid, const ChainExperts& experts = {})
      : experts_(experts), grid_(grid), words_(static_cast<uint8_t*>(scratch)) {
    a.launches = static_cast<uint32_t*>(scratch);
    words_ += kMostBlocks * sizeof(uint32_t);
  }

  // The end of all words; those of deltas may follow.
  uint8_t* words_end() const { return words_; }

  // [kMostChainedRows, width / 2] in sectors
  Word* rows_of_words(int64_t width) {
    auto* rows = reinterpret_cast<Word*>(words_);
    words_ += place_of_word(kMostChainedRows * width / 2);
    return rows;
  }

  Phase& add(const ChainProduct& product, Kind kind) {
    const bool gated = kind == Kind::kGate;
    const Form form = form_of(product);
    // Two or four codes lie where one number does.
    a.weights[a.num_phases] =
        weight_map(product.weight, product.out_features, product.in_features / packed(form), gated);
    return add_phase({.kind = kind,
                      .units = static_cast<int>(product.in_features / kUnit),
                      .chunks = chunks_of(product.in_features, form),
                      .outputs = static_cast<int>(product.out_features / (gated ? 2 : 1)),
                      .bias = product.bias,
                      .scales = product.scales});
  }

  // Of the chosen experts: the outputs of all of them.
  Phase& add_gates(const ChainProduct& product) {
    const ChainProduct& shared = experts_.shared_up;
    a.weights[a.num_phases] = expert_weight_map(product.weight, num_routed(experts_), product.out_features,
                                                product.in_features, true);
    if (shared.weight != nullptr)
      a.shared[0] = weight_map(shared.weight, shared.out_features, shared.in_features, true);
    const int outputs = static_cast<int>(product.out_features / 2);
    return add_phase({.kind = Kind::kGate,
                      .units = static_cast<int>(product.in_features / kUnit),
                      .chunks = chunks_of(product.in_features, Form::kNumbers),
                      .outputs = num_ranks() * outputs,
                      .part = outputs});
  }

  // Takes these.
  Phase& add_downs(const ChainProduct& product) {
    const ChainProduct& shared = experts_.shared_down;
    a.weights[a.num_phases] =
        expert_quarter_map(product.weight, num_routed(experts_), product.out_features, product.in_features);
    if (shared.weight != nullptr)
      a.shared[1] = expert_quarter_map(shared.weight, 1, shared.out_features, shared.in_features);
    const int units = static_cast<int>(product.in_features / kUnit);
    return add_phase({.kind = Kind::kAdd,
                      .units = num_ranks() * units,
                      .chunks = chunks_of(num_ranks() * product.in_features, Form::kNumbers),
                      .outputs = static_cast<int>(product.out_features),
                      .part = units});
  }

  // Its pieces have so many stages that no CTA has two of them, and who draws reads all sums at once.
  void add_foresight(const SkinnyChainParams& p) {
    Foresight& f = a.foresight;
    const int64_t experts = num_routed(experts_), tiles = ceil_div(experts, kTile);
    f.row_chunks = foresight_chunks(p.output.in_features, p.output.out_features);
    const int64_t columns = round_up(p.output.in_features, kForesightColumns) + p.output.out_features;
    f.weights = weight_map(experts_.foresight, experts, columns, false);
    const int per_lane = experts > kMostRouted / 2 ? kMostRouted / kWarp : kMostRouted / kWarp / 2;
    f.span = static_cast<int>(
        std::max(ceil_div(tiles * f.row_chunks, grid_), ceil_div(f.row_chunks, most_sum_parts(per_lane))));
    f.parts = static_cast<int>(ceil_div(f.row_chunks, f.span));
    f.pieces = static_cast<int>(tiles) * f.parts;
    f.rows = static_cast<int>(tiles) * kTile;
    f.words = rows_of_words(int64_t{f.parts} * f.rows / kMostChainedRows);
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

  int num_ranks() const {
    return static_cast<int>(experts_.num_chosen) + (experts_.shared_up.weight != nullptr ? 1 : 0);
  }

  const ChainExperts experts_;
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
    a.num_read = reinterpret_cast<unsigned long long*>(p.experts.num_read);
    if (p.experts.foresight != nullptr) builder.add_foresight(p);
  }
  Phase& gate = has_experts ? builder.add_gates(p.gate_up) : builder.add(p.gate_up, Kind::kGate);
  norm_from(gate, p.mlp_norm, from);
  gate.to = builder.rows_of_words(gate.outputs);
  Phase& down = has_experts ? builder.add_downs(p.down) : builder.add(p.down, Kind::kAdd);
  down.from = gate.to;
  down.out = static_cast<BFloat16*>(p.residual);
}

void add_delta(AdaptedArguments& a, int phase, const LoraSite& site, uint8_t* words, int grid) {
  Delta& delta = a.deltas[phase];
  delta.site = site;
  delta.words = reinterpret_cast<uint64_t*>(words) + phase * kDeltaWords;
  if (site.a == nullptr) return;
  const Phase& product = a.phases[phase];
  const int64_t outputs = int64_t{product.outputs} * (product.kind == Kind::kGate ? 2 : 1);
  check(site.num_parts >= 1 && site.num_parts <= kMostDeltaParts &&
            site.in_features == product.units * kUnit && site.out_features == outputs &&
            is_aligned(site.a, 16) && is_aligned(site.b, 16),
        "skinny_chain: a site that does not fit its product");
  const int64_t tiles = a.num_tokens * site.num_parts * site.most_rank / kTile;
  check(site.most_rank % kLoraRanks == 0 && site.most_rank <= kMostChainedRank && tiles <= grid,
        "skinny_chain: rank");
  delta.tiles = static_cast<int>(tiles);
  a.a[phase] = weight_map(site.a, site.num_slots * site.num_parts * site.most_rank, site.in_features, false);
}

AdaptedArguments adapted(const Arguments& plain, const ChainDeltas& deltas, uint8_t* words, int grid) {
  AdaptedArguments a{};
  static_cast<Arguments&>(a) = plain;
  a.slots = deltas.slots;
  const LoraSite* sites[kDeltaPhases] = {&deltas.output, &deltas.gate_up, &deltas.down, &deltas.next_qkv};
  for (int i = 0; i < a.num_phases; ++i) add_delta(a, i, *sites[i], words, grid);
  return a;
}

GroupedArguments grouped(const Arguments& plain, std::initializer_list<const ChainProduct*> products) {
  GroupedArguments a{};
  static_cast<Arguments&>(a) = plain;
  const ChainProduct* const* product = products.begin();
  for (int i = 0; i < a.num_phases; ++i, ++product) {
    const Form form = form_of(**product);
    const int64_t lines = is_fine(form) ? (*product)->in_features / depth_unit(form) : a.phases[i].chunks;
    a.groups[i] = group_map((*product)->groups, (*product)->out_features, lines, group_lines(form),
                            a.phases[i].kind == Kind::kGate);
  }
  return a;
}

// Of one row: several keep memory busy until attention begins.
Ahead ahead_of(const SkinnyChainParams& p, Form form) {
  const ChainProduct& next = p.next.gate_up;
  const bool is_same =
      next.in_features == p.gate_up.in_features && next.out_features == p.gate_up.out_features;
  if (p.num_tokens > 1 || form != Form::kInt4 || next.weight == nullptr || next.groups == nullptr || !is_same)
    return {};
  check(is_aligned(next.weight, 16) && is_aligned(next.groups, 16),
        "skinny_chain: gate and up of the next layer are aligned to 16 bytes");
  return {static_cast<const uint8_t*>(next.weight), reinterpret_cast<const uint8_t*>(next.groups)};
}

// What depends on all products together.
void finish(Arguments& a, int num_tokens, Form form, int64_t normed, bool beside_attention = false) {
  a.num_tokens = num_tokens;
  const bool in_bytes = form == Form::kInt4 && num_tokens == 1;
  for (int i = 0; i < a.num_phases; ++i) {
    const Phase& phase = a.phases[i];
    a.row_pitch = std::max(a.row_pitch, padded_bytes(in_bytes ? kept_stages(phase) : phase.chunks, form));
  }
  a.row_pitch = std::max(a.row_pitch, padded_bytes(a.foresight.row_chunks, form));
  if (!in_bytes) {  // a row in bytes is alone, and gains come to it from the L2
    a.row_pitch += kRowPad;
    a.gain_bytes = padded_bytes(chunks_of(normed, form), form);
  }
  const Depth depth = depth_of(a, form, beside_attention);
  a.stages = depth.stages;
  a.in_advance = depth.in_advance;
  a.in_flight = depth.in_flight;
  a.in_stream = depth.in_stream;
  a.lets_next_in_early = depth.lets_next_in_early;
}

Arguments arguments_of(const SkinnyChainParams& p, Builder& builder) {
  const int64_t hidden = p.output.out_features;
  const Form form = form_of(p.output);
  Arguments& a = builder.a;
  Phase& output = builder.add(p.output, Kind::kAdd);
  output.out = static_cast<BFloat16*>(p.residual);
  output.to = builder.rows_of_words(hidden);
  add_feed_forward(builder, p, output.to);
  if (p.next.qkv.weight != nullptr) {
    Phase& down = a.phases[a.num_phases - 1];
    down.to = builder.rows_of_words(hidden);
    Phase& next = builder.add(p.next.qkv, Kind::kStore);
    norm_from(next, p.next.norm, down.to);
    next.out = static_cast<BFloat16*>(p.next.out);
    a.tap = p.next.tap;
  }
  if (p.deltas.slots != nullptr) a.delta_bytes = delta_bytes(p.num_tokens);
  finish(a, p.num_tokens, form, hidden, p.experts.beside_attention);
  a.attended = p.attended;
  a.activation = p.activation;
  return a;
}

void check_params(const SkinnyChainParams& p) {
  const ChainExperts& experts = p.experts;
  const Form form = form_of(p.output);
  const int64_t attended = p.output.in_features, hidden = p.output.out_features, inner = p.down.in_features;
  if (experts.router.weight != nullptr) {
    const bool has_shared = experts.shared_up.weight != nullptr;
    check(p.num_tokens == 1 && form == Form::kNumbers,
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
    check(can_chain(attended, hidden, inner, bits_of(form), is_fine(form)), "skinny_chain: sizes");
    check(p.mlp_norm.offset == 0 && p.next.norm.offset == 0, "skinny_chain: offsets of norms");
  }
  for (const ChainProduct* product : {&experts.router, &p.gate_up, &p.down, &p.next.qkv})
    check(product->weight == nullptr || form_of(*product) == form,
          "skinny_chain: some weights are in codes and some are not");
  check(p.gate_up.in_features == hidden && p.gate_up.out_features == 2 * inner &&
            p.down.out_features == hidden &&
            (p.next.qkv.weight == nullptr || p.next.qkv.in_features == hidden),
        "skinny_chain: products that do not fit each other");
  for (const void* pointer :
       {p.attended, p.output.weight, p.gate_up.weight, p.down.weight, p.next.qkv.weight, p.mlp_norm.weight,
        p.next.norm.weight, experts.router.weight, experts.shared_up.weight, experts.shared_down.weight,
        experts.foresight, static_cast<const void*>(p.scratch)})
    check(is_aligned(pointer, 16), "skinny_chain: rows and weights are aligned to 16 bytes");
  check(in_range(p.next.tap) && !p.next.tap.store_output, "skinny_chain: tap");
  check(p.deltas.slots == nullptr || (experts.router.weight == nullptr && form == Form::kNumbers),
        "skinny_chain: adapters are chained beside weights in numbers, without experts");
}

}  // namespace
}  // namespace chain

namespace {

// depths: of the products; widths: of what they leave for each other, of all experts together
bool has_room(std::initializer_list<int64_t> depths, std::initializer_list<int64_t> widths, int64_t longest,
              int64_t hidden, int num_tokens, chain::Form form, bool has_deltas = false) {
  using namespace chain;
  for (const int64_t depth : depths)
    if (depth < kUnit || depth % depth_unit(form) != 0) return false;
  size_t scratch = kMostBlocks * sizeof(uint32_t);
  for (const int64_t width : widths)
    scratch += static_cast<size_t>(place_of_word(kMostChainedRows * width / 2));
  if (has_deltas) scratch += kDeltaPhases * kDeltaWords * sizeof(uint64_t);
  const int row = padded_bytes(chunks_of(longest, form), form),
            gain = padded_bytes(chunks_of(hidden, form), form);
  const int beside = has_deltas ? delta_bytes(num_tokens) : 0;
  const int most = Places(form, fewest_stages(form), num_tokens, row + kRowPad, gain, beside).total;
  return most <= kMostSharedBytes && multiprocessors() <= kMostBlocks && scratch <= kChainScratchBytes;
}

}  // namespace

bool can_chain(int64_t attended, int64_t hidden, int64_t inner, int bits, bool fine) {
  return has_room({attended, hidden, inner}, {hidden, inner, hidden}, std::max({attended, hidden, inner}),
                  hidden, kMostChainedRows, chain::form_of_bits(bits, fine));
}

bool can_chain_deltas(int64_t attended, int64_t hidden, int64_t inner, int64_t most_rank) {
  using namespace chain;
  const int64_t tiles = kMostChainedRows * kMostDeltaParts * most_rank / kTile;
  return most_rank <= kMostChainedRank && tiles <= multiprocessors() &&
         has_room({attended, hidden, inner}, {hidden, inner, hidden}, std::max({attended, hidden, inner}),
                  hidden, kMostChainedRows, Form::kNumbers, true);
}

bool can_chain_experts(int64_t attended, int64_t hidden, int64_t inner, int64_t num_experts,
                       int64_t num_chosen, bool has_shared) {
  using namespace chain;
  if (num_chosen < 1 || num_chosen > std::min<int64_t>(kMostRanks, num_experts)) return false;
  if (num_experts > kMostRouted || num_experts % 4 != 0 || inner > kStageDepth) return false;
  const int64_t ranks = num_chosen + (has_shared ? 1 : 0), logits = num_experts + (has_shared ? 1 : 0);
  const int64_t row = foresight_chunks(attended, hidden) * int64_t{kStageDepth};
  const int64_t foreseen = row / kStageDepth * round_up(num_experts, kTile) / kMostChainedRows;
  return has_room({attended, hidden, inner}, {hidden, logits, foreseen, ranks * inner, hidden},
                  std::max(row, ranks * inner), hidden, 1, Form::kNumbers);
}

void skinny_chain(const SkinnyChainParams& p, Stream stream) {
  using namespace chain;
  check_params(p);
  const int grid = multiprocessors();
  Builder builder(p.scratch, grid, p.experts);
  const Arguments a = arguments_of(p, builder);
  if (p.deltas.slots != nullptr)
    return launch_adapted_chain(adapted(a, p.deltas, builder.words_end(), grid), grid, stream);
  const Form form = form_of(p.output);
  if (is_grouped(form)) {
    GroupedArguments of_groups = grouped(a, {&p.output, &p.gate_up, &p.down, &p.next.qkv});
    of_groups.ahead = ahead_of(p, form);
    return launch_grouped_chain(of_groups, form, grid, stream);
  }
  launch_chain(a, form, grid, stream);
}

bool can_chain_linear(int64_t in_features, int bits, bool fine) {
  return has_room({in_features}, {}, in_features, 0, kMostChainedRows, chain::form_of_bits(bits, fine));
}

void chained_linear(const ChainedLinearParams& p, Stream stream) {
  using namespace chain;
  const Form form = form_of(p.product);
  check(p.num_tokens >= 1 && p.num_tokens <= kMostChainedRows, "chained_linear: 1 to 4 rows");
  check(can_chain_linear(p.product.in_features, bits_of(form), is_fine(form)), "chained_linear: sizes");
  check(is_aligned(p.x, 16) && is_aligned(p.product.weight, 16) && is_aligned(p.product.groups, 16),
        "chained_linear: rows and weights are aligned to 16 bytes");
  const int grid = multiprocessors();
  Builder builder(p.scratch, grid);
  const bool gated = p.result == SkinnyResult::kGate, adds = p.result == SkinnyResult::kAdd;
  Phase& phase = builder.add(p.product, gated ? Kind::kGate : adds ? Kind::kAdd : Kind::kStore);
  phase.out = static_cast<BFloat16*>(p.out);
  Arguments& a = builder.a;
  finish(a, p.num_tokens, form, 0);
  a.attended = p.x;
  a.activation = p.activation;
  if (is_grouped(form)) return launch_grouped_chain(grouped(a, {&p.product}), form, grid, stream);
  launch_chain(a, form, grid, stream);
}

}  // namespace bequest::cuda
