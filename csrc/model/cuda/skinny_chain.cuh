// The sizes of skinny_chain.cu, its arguments and its shared memory.
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "device/barriers.cuh"
#include "device/reductions.cuh"
#include "model/cuda/skinny_chain.h"
#include "ops/cuda/skinny_stage.cuh"

namespace bequest::cuda::chain {

inline constexpr int kWarps = 8;  // that multiply
inline constexpr int kConsumers = kWarps * kWarp;
// One more warp asks for weights, and another one chooses experts, where there are any.
constexpr int threads_of(bool has_experts) { return kConsumers + (has_experts ? 2 : 1) * kWarp; }
inline constexpr int kTile = kStageRows;
inline constexpr int kUnit = 256;                       // of k: 32 for each warp
inline constexpr int kSliceBytes = kUnit / kWarps * 2;  // a warp's part of a unit of x
inline constexpr int kSteps = kStageDepth / kUnit;      // accesses of a lane to a stage
// Codes become float16 in one instruction for two of them, bfloat16 in four. So x is float16 beside them,
// scaled down: what is too large for that, from 2^20 on, stays the largest.
inline constexpr float kBesideCodes = 1.0f / 16;

// What weights are kept in: numbers, e4m3, codes of 4 bits in groups of 128 along k, or codes of 4 or 8 bits,
// or e4m3, in groups of 32.
enum class Form { kNumbers, kFloat8, kInt4, kFine4, kFine8, kFineFloat8 };

constexpr bool is_fine_of_8(Form form) { return form == Form::kFine8 || form == Form::kFineFloat8; }
constexpr bool is_fine(Form form) { return form == Form::kFine4 || is_fine_of_8(form); }
constexpr bool is_grouped(Form form) { return form == Form::kInt4 || is_fine(form); }
// Values of a weight that lie where one number does.
constexpr int packed(Form form) {
  if (form == Form::kNumbers) return 1;
  return form == Form::kFloat8 || is_fine_of_8(form) ? 2 : 4;
}
// What rows of weights are a multiple of.
constexpr int depth_unit(Form form) { return is_fine(form) ? 1024 : packed(form) * kUnit; }
constexpr int stage_units(Form form) { return kSteps * packed(form); }  // of k
template <Form kForm>
inline constexpr int kStageUnits = stage_units(kForm);
template <Form kForm>
inline constexpr int kStageBytesOfX = kStageUnits<kForm> * kSliceBytes;  // of a warp
// Behind the codes of a stage, what its groups are scaled by: lines of a word for each of 8 rows and 32
// groups.
constexpr int group_lines(Form form) {
  if (!is_grouped(form)) return 0;
  return form == Form::kInt4 ? 1 : form == Form::kFine4 ? 4 : 2;
}
constexpr int ring_bytes(Form form) { return kStageBytes + group_lines(form) * kGroupBytes; }
// Codes of 4 bits have few stages along k, and a product that waits for all of x waits longest for its last
// values. So CTAs take tiles in turns, and what they make is complete from its first values on; and the tiles
// of a round are multiplied stage by stage.
constexpr bool goes_by_stages(Form form) { return form == Form::kInt4; }
// One row of x is multiplied by them as bytes (skinny_chain_bytes.cuh), several rows as float16.
template <int T>
constexpr bool is_in_bytes(Form form) {
  return goes_by_stages(form) && T == 1;
}
inline constexpr int kRoundTiles = 8;  // whose sums wait in shared memory for their end
inline constexpr int kPlaces = kRoundTiles * kTile;
inline constexpr int kPartPitch = kPlaces + 4;  // floats; warps that are read at once lie in different banks
inline constexpr int kMostStages = 12;
inline constexpr int kMostPhases = 5;
inline constexpr int kMostRanks = 32;    // experts of a row
inline constexpr int kMostRouted = 256;  // experts of a layer
static_assert(kWarps == kStageWarps && kStepBytes == kUnit * kTile * 2 && kQuarterLines * kLine == kUnit);
// Parts of sums that a lane with so many experts has registers for.
constexpr int most_sum_parts(int per_lane) { return 24 / per_lane; }
static_assert(kForesightColumns == kStageDepth);
static_assert(kPlaces * kMostChainedRows == kConsumers, "a thread has one result of a round");

enum class Kind { kAdd, kGate, kStore };

// Two results and the number of the launch that made them. Who reads the number it waits for has the results.
struct alignas(8) Word {
  uint32_t values;  // two bfloat16
  uint32_t launch;
};

// Words lie in sectors of the L2, apart from each other: all CTAs read all of them at once, and so more of
// the L2 answers.
inline constexpr int kSectorWords = 4, kSectorPitch = 64;  // bytes
static_assert(kSectorWords * sizeof(Word) == 32);
template <class Index>
__host__ __device__ constexpr Index place_of_word(Index word) {
  return word / kSectorWords * kSectorPitch + word % kSectorWords * static_cast<Index>(sizeof(Word));
}

// How many launches there are with this one. Made of the number before when it is needed: who adds to it
// waits for it to come from memory, and the compiler would add at once.
class LaunchNumber {
 public:
  __device__ explicit LaunchNumber(uint32_t before) : before_(before) {}

  __device__ __forceinline__ uint32_t get() const {
    uint32_t number;
    asm volatile("add.u32 %0, %1, 1;" : "=r"(number) : "r"(before_));
    return number;
  }

 private:
  uint32_t before_;
};

// A product as all CTAs see it.
struct Phase {
  Kind kind;
  int units;               // of K, of all experts together
  int chunks;              // stages along k
  int outputs;             // of a token, of all experts together
  int part;                // of one expert: outputs of gate and up, units of down
  int tiles_each, longer;  // the first `longer` CTAs have one tile more than the others
  float eps, offset;
  const void* gain;     // [K] bfloat16 of the norm of x, or null
  const void* bias;     // [N] bfloat16, or null
  const float* scales;  // [N], of codes
  const Word* from;     // [T, K / 2] in sectors: x; null: the first phase, whose x is `attended`
  Word* to;             // [T, outputs / 2] in sectors: what the next phase reads, or null
  BFloat16* out;        // [T, outputs], or null
};

// What experts are asked for by before the router has spoken: skinny_chain_foresight.cuh.
struct Foresight {
  CUtensorMap weights;
  int pieces;      // of stages along k; 0: nothing is foreseen
  int parts;       // pieces of a tile
  int span;        // stages of a piece
  int row_chunks;  // stages of [attended | residual]
  int rows;        // experts, filled up to whole tiles
  Word* words;     // [parts, rows / 2] in sectors: see pair_of_sums
};

// A CTA's pieces are its `first`, and each `gridDim.x` further on. The first CTAs have them, because they
// begin first: the last ones may find another kernel in their place. Those have the router's tiles.
struct Piece {
  int row;           // of F
  int begin, count;  // stages
  int part;

  __device__ static int first() { return static_cast<int>(blockIdx.x); }
  __device__ static Piece of(const Foresight& f, int index) {
    const int tile = index / f.parts, part = index - tile * f.parts, begin = part * f.span;
    return {tile * kTile, begin, min(f.span, f.row_chunks - begin), part};
  }
};

struct Arguments {
  CUtensorMap weights[kMostPhases];  // see weight_map
  CUtensorMap shared[2];             // of the expert that every row takes: gate and up, down
  Phase phases[kMostPhases];
  int num_phases, num_tokens, num_experts, num_chosen, stages, in_flight, in_stream, row_pitch;
  int gain_bytes;
  int delta_bytes;  // of shared memory for what adapters add
  int in_advance;   // as in_flight, of the first ring
  bool lets_next_in_early, renormalises, has_shared;
  float factor;
  const Word* logits;  // [E / 2] in sectors: the router's
  Foresight foresight;
  const void* attended;
  Activation activation;
  HiddenTap tap;                 // of the results of the phase before the last
  uint32_t* launches;            // [CTAs]: how many there were; each CTA has its own
  unsigned long long* num_read;  // as ChainExperts has it
};

// Of x in bytes: all where there are several rounds, else each takes the place of the one before.
__host__ __device__ constexpr int kept_stages(const Phase& phase) {
  return phase.tiles_each + (phase.longer > 0 ? 1 : 0) > kRoundTiles ? phase.chunks : 1;
}

// A product as one CTA sees it, in shared memory, because reading arguments by index takes much longer.
struct alignas(16) View {
  int units, chunks;
  int first, end;  // tiles, see tile_at
  int outputs, part;
  Kind kind;
  int gain;  // whose gain in shared memory, -1: no norm
  float eps, offset;
  const BFloat16* gains;  // the same in memory
  const BFloat16* bias;
  const float* scales;
  const Word* from;
  Word* to;
  BFloat16* out;
  // The tap looks at the results. Kept here because an argument that nobody has read in this launch comes
  // from the L2, and words would wait for it: 1,500 clocks.
  bool is_tapped;
  int leading;  // a tile that is taken in place of the first one, -1: none
  int kept;     // stages of x in bytes that are there at once

  // shared: tiles of gate and up of the expert that every row takes, 0: there are none, or too many. They are
  // the last ones. CTAs begin with them, one each, because they can be asked for before the choice.
  template <Form kForm>
  __device__ static View of(const Phase& phase, int block, int gain, bool is_tapped, int shared = 0) {
    const int before = goes_by_stages(kForm) ? 0 : block * phase.tiles_each + min(block, phase.longer);
    const int first = before - min(block + 1, shared);
    return {phase.units,
            phase.chunks,
            first,
            first + phase.tiles_each + (block < phase.longer ? 1 : 0),
            phase.outputs,
            phase.part,
            phase.kind,
            phase.gain != nullptr ? gain : -1,
            phase.eps,
            phase.offset,
            static_cast<const BFloat16*>(phase.gain),
            static_cast<const BFloat16*>(phase.bias),
            phase.scales,
            phase.from,
            phase.to,
            phase.out,
            is_tapped,
            block < shared ? phase.outputs / (kTile / 2) - shared + block : -1,
            kept_stages(phase)};
  }
};

// The tile that a view counts as `index`.
template <Form kForm>
__device__ __forceinline__ int tile_at(int index) {
  return goes_by_stages(kForm) ? index * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x) : index;
}

// A tile of gate and up of experts.
__device__ __forceinline__ int gate_tile_at(int index, int first, int leading) {
  return index == first && leading >= 0 ? leading : index;
}

__device__ __forceinline__ int stages_of(const View& view) { return (view.end - view.first) * view.chunks; }

// Those of gate and up that are asked for before the choice: of the first round, whose sums wait for it.
__device__ __forceinline__ int stages_ahead(const Foresight& f, const View& gate) {
  return f.pieces > 0 ? min(kRoundTiles, gate.end - gate.first) * gate.chunks : 0;
}

// The choice as one CTA sees it.
struct alignas(16) ChoiceView {
  const Word* logits;  // [E / 2] in sectors: the router's
  const Word* sums;    // [parts, E filled up to tiles / 2] in sectors: what tells ahead who is best
  int parts;           // 0: nobody is foreseen
  int num_experts, num_chosen;
  int first_ahead, last_ahead;   // ranks of which stages are asked for ahead
  unsigned long long* num_read;  // null: another CTA counts, or nobody
  float factor;
  bool renormalises, has_shared;

  __device__ static ChoiceView of(const Arguments& a, const View& gate) {
    const int stages = stages_ahead(a.foresight, gate), tiles = gate.part / (kTile / 2);
    const int first = gate.first + (gate.leading >= 0 ? 1 : 0);
    const int last = (gate.first + (stages - 1) / gate.chunks) / tiles;
    return {a.logits,
            a.foresight.words,
            a.foresight.parts,
            a.num_experts,
            a.num_chosen,
            first / tiles,
            stages > 0 ? min(last, a.num_chosen - 1) : -1,
            blockIdx.x == 0 ? a.num_read : nullptr,
            a.factor,
            a.renormalises,
            a.has_shared};
  }
};

// By way of a shuffle, so that it is kept: the compiler would read the special register again and again,
// which takes longer than multiplying.
__device__ __forceinline__ int kept(int value) {
  return __shfl_sync(kAllLanes, value, static_cast<int>(threadIdx.x) % kWarp);
}

struct Ring {
  PhaseBarrier full[kMostStages];   // the bytes of a stage are there
  PhaseBarrier empty[kMostStages];  // all warps have read them
};

// The experts of the row, by id.
struct Chosen {
  int ids[kMostRanks];
  bool discards;                 // what was asked for before is of others
  float counts[kMostRanks + 1];  // the last of them is the shared one's
  PhaseBarrier there, counted;   // ids are, and counts
};

// Those that it is likely to take, by id.
struct Foreseen {
  int ids[kMostRanks];
  PhaseBarrier there;
};

// Which product is which: with experts the router is one more.
template <bool kHasExperts>
struct Order {
  static constexpr int kRouter = 1, kGate = kHasExperts ? 2 : 1, kDown = kGate + 1, kNext = kGate + 2;
};

// What follows the ring, the rows of x and the gains in shared memory.
struct Fixed {
  View views[kMostPhases];
  float squares[kMostPhases][kMostChainedRows][kWarps];  // sums of x², where x is normed
  Ring ring;
};
struct ExpertFixed : Fixed {
  Chosen chosen;
  Foreseen foreseen;
  ChoiceView choice;
};
template <bool kHasExperts>
using FixedOf = std::conditional_t<kHasExperts, ExpertFixed, Fixed>;

// Of the rows of x, over each group of 128 and stage of a warp: so many bytes, and a part of what x takes. In
// bytes a row has units of groups behind its sums.
inline constexpr int kSumBytes = kMostChainedRows * kSteps * 4;
inline constexpr int kSumShare = stage_units(Form::kInt4) * kSliceBytes / kSumBytes;

// Where things lie in dynamic shared memory.
struct Places {
  int rows, gains, fixed, parts, deltas, sums, total;

  __host__ __device__ Places(Form form, int stages, int num_tokens, int row_pitch, int gain_bytes,
                             int delta_bytes) {
    rows = stages * ring_bytes(form);
    gains = rows + num_tokens * row_pitch;  // two of gain_bytes
    fixed = gains + 2 * gain_bytes;
    parts = fixed + static_cast<int>(form == Form::kNumbers ? sizeof(ExpertFixed) : sizeof(Fixed));
    deltas = parts + 2 * num_tokens * kWarps * kPartPitch * 4;  // [2, T, kWarps, kPartPitch]
    sums = deltas + delta_bytes;  // [kWarps, chunks, kMostChainedRows, kSteps] floats: of groups of x
    total = sums + (form == Form::kInt4 ? row_pitch / kSumShare : 0);
  }
};

// A row of x, and a gain, in shared memory: for each warp its 32 of each unit, filled up to whole stages. Of
// codes a lane reads 16 or 32 of a row at once, so that two or four units are one: a warp has 64 neighbours
// of each 512, or 128 of each 1024. The slice of 32 values that lies at a warp's place for a unit:
template <Form kForm>
__device__ __forceinline__ int slice_of(int unit, int warp) {
  constexpr int kPacked = packed(kForm);
  return unit / kPacked * (kPacked * kWarps) + kPacked * warp + unit % kPacked;
}

// Where a lane reads of the 128 or 64 neighbours of x that its quad has at once: all of its own, or a part of
// each group.
constexpr int lane_bytes(Form form) { return is_fine(form) ? 16 : 16 * packed(form); }
constexpr int access_bytes(Form form) { return is_fine(form) ? 64 : 16; }

// Where the 16 bytes `piece` of a row lie. Of codes in groups of 128 a quad's lanes read pieces that are 64
// bytes apart; those of the last two lanes change places with their neighbours, so that all are in different
// banks.
template <Form kForm>
__device__ __forceinline__ int place_of_piece(int piece) {
  return kForm == Form::kInt4 ? piece ^ (piece >> 3 & 1) : piece;
}
// The first of a lane's, and which half of it.
template <Form kForm>
__device__ __forceinline__ int lane_in_row(int lane) {
  return place_of_piece<kForm>(lane % 4 * (lane_bytes(kForm) / 16)) * 16 + lane / 4 % 2 * 8;
}

// Gate and up of the next chain, of the sizes of this one's: codes of 4 bits and what groups of 128 are
// scaled by, rows filled up to whole stages.
struct Ahead {
  const uint8_t *codes, *groups;  // null: nothing is asked for ahead
};

// Of weights in groups.
struct GroupedArguments : Arguments {
  CUtensorMap groups[kMostPhases];  // see group_map
  Ahead ahead;
};

struct AdaptedArguments;

// A phase as this CTA sees it, where there are experts.
__device__ __forceinline__ View expert_view(const Arguments& a, int phase) {
  using Order = Order<true>;
  const Phase& own = a.phases[phase];
  const int block = static_cast<int>(blockIdx.x), last = static_cast<int>(gridDim.x) - 1;
  const int tiles = own.part / (kTile / 2);  // of an expert
  return View::of<Form::kNumbers>(own, phase == Order::kRouter ? last - block : block,
                                  phase < Order::kNext ? 0 : 1,
                                  phase == Order::kDown && a.tap.ring_rows != nullptr,
                                  phase == Order::kGate && a.has_shared && tiles <= last + 1 ? tiles : 0);
}

// REQUIRES: as many CTAs as the chip has room for at once.
void launch_chain(const Arguments& a, Form form, int grid, Stream stream);
void launch_adapted_chain(const AdaptedArguments& a, int grid, Stream stream);
void launch_grouped_chain(const GroupedArguments& a, Form form, int grid, Stream stream);

}  // namespace bequest::cuda::chain
