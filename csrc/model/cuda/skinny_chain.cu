// One CTA on each multiprocessor, all at once. The weights of all products stream through a ring in shared
// memory, asked for by a warp that looks at nothing else: when the rows of a product are there, its weights
// are, too. They begin before the predecessor has ended, because weights depend on nothing.
//
// Between the products all CTAs need what all have made. Results go to the L2 as words of two values and the
// number of the launch; whoever needs them reads them until the number is right. No barrier, no fence: value
// and number are one access. Each launch counts for itself, so that graphs can be replayed.
//
// Eight warps multiply. They divide k: of each 256, a warp has 32, and reads only these of x, so that no warp
// waits for another until their sums meet. A norm needs no pass of its own: its weight is multiplied into x,
// the sum of squares is one more result, and what it comes to is a factor of the output.
//
// It cannot hang: CTAs wait for CTAs of the same launch alone; there are no more than the chip has room for
// at once; whatever else holds that room (attention before it, other streams) ends without them, and kernels
// behind it are let in when all of them have begun, or later. Should that ever be untrue, waiting ends in a
// trap.
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_bytes.cuh"
#include "model/cuda/skinny_chain_choice.cuh"
#include "model/cuda/skinny_chain_deltas.cuh"
#include "model/cuda/skinny_chain_foresight.cuh"
#include "model/cuda/skinny_chain_results.cuh"
#include "model/cuda/skinny_chain_rows.cuh"
#include "model/cuda/skinny_chain_sums.cuh"
#include "model/cuda/skinny_chain_weights.cuh"
#include "ops/cuda/skinny_linear.cuh"

namespace bequest::cuda {
namespace chain {
namespace {

// step(now, next) `count` times, where the next of one is the now of the other; at the end what is taken for
// the next round, if anything is left, is in `even`.
template <class W, class Step>
__device__ __forceinline__ void in_turns(int count, const int& left, W& even, W& odd, const Step& step) {
#pragma unroll 1
  for (;;) {
    step(even, odd);
    if (--count == 0) break;
    step(odd, even);
    if (--count == 0) return;
  }
  if (left > 0) even = odd;
}

// Where a lane finds its x of a phase, and the sums of its groups where those are needed.
template <Form kForm>
struct XPlace {
  uint32_t begin, sums;

  template <int T>
  __device__ __forceinline__ static XPlace of(const Arguments& a, const Places& places, const uint8_t* shared,
                                              int chunks, int warp, int lane) {
    if constexpr (is_in_bytes<T>(kForm))
      return {
          shared_address(shared + places.rows) + warp * (chunks * kStageBytesOfX<kForm>)+lane_in_bytes(lane),
          shared_address(shared + places.sums) + warp * chunks * kSumBytes};
    // Columns beyond the last row of x are the last; nobody stores what becomes of them.
    const uint32_t row = shared_address(shared + places.rows) + min(lane / 8, T - 1) * a.row_pitch;
    return {row + lane_in_row<kForm>(lane) + warp * (chunks * kStageBytesOfX<kForm>),
            shared_address(shared + places.sums) + warp * chunks * kSumBytes + lane % 4 * 16};
  }
  __device__ __forceinline__ XPlace of_stage(int chunk) const {
    return {begin + chunk * kStageBytesOfX<kForm>, sums + chunk * kSumBytes};
  }
  __device__ __forceinline__ void prepare(int lane) const {
    if constexpr (kForm == Form::kInt4) Row<kForm>::prepare(begin, sums, lane);
  }
};

// The sums of `count` tiles of the next stages, of which `left` are left in the phase and the first is in
// `even`. to: of the lane's row, and of its token if it has one
template <Form kForm>
__device__ __forceinline__ void multiply_tiles(RingEnd<kForm>& ring, int count, int chunks,
                                               const XPlace<kForm>& place, bool has_token, float* to,
                                               int& left, Weights<kForm>& even, Weights<kForm>& odd) {
  Row<kForm> x;
  x.load(place.begin);
  if (chunks == 1) {
    const auto step = [&](const Weights<kForm>& now, Weights<kForm>& next) {
      if (--left > 0) ring.take(next);
      TileSum sum;
      sum.add(now, x);
      ring.give_back(now);
      if (has_token) *to = sum.total();
      to += kTile;
    };
    return in_turns(count, left, even, odd, step);
  }
  const uint32_t x_end = place.begin + chunks * kStageBytesOfX<kForm>;
  uint32_t x_at = place.begin;
  TileSum sum;
  const auto step = [&](const Weights<kForm>& now, Weights<kForm>& next) {
    if (--left > 0) ring.take(next);
    sum.add(now, x);
    ring.give_back(now);
    x_at += kStageBytesOfX<kForm>;
    if (x_at == x_end) {
      x_at = place.begin;
      if (has_token) *to = sum.total();
      sum = TileSum{};
      to += kTile;
    }
    x.load(x_at);
  };
  in_turns(count * chunks, left, even, odd, step);
}

// The same of one stage along k of each tile, added to what is there if `adds`. A stage's weights are read
// when the ones before are multiplied, so that the loop is short: instructions take longer to come than to
// run.
template <Form kForm>
__device__ __forceinline__ void multiply_stages(RingEnd<kForm>& ring, int count, const XPlace<kForm>& place,
                                                bool adds, bool has_token, float* to, int& left,
                                                Weights<kForm>& w) {
  Row<kForm> x;
  x.load(place.begin, place.sums);
#pragma unroll 1
  for (; count > 0; --count) {
    float before = 0;  // read here, where nothing waits for it
    if (adds && has_token) before = *to;
    float sums[kSteps][4] = {};
    TileSum::multiply_codes(w, x, sums);
    uint32_t groups[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) groups[s] = w.groups[s];
    ring.give_back(w);
    if (--left > 0) ring.take(w);
    // Not before the next weights are on their way.
#pragma unroll
    for (auto& of_group : sums) asm volatile("" : "+f"(of_group[0]), "+f"(of_group[3]));
    TileSum sum;
    sum.add_scaled(groups, x, sums);
    const float total = before + sum.total();
    if (has_token) *to = total;
    to += kTile;
  }
}

// Stages x of the output product with the residual behind it, and multiplies what tells the experts ahead.
__device__ __forceinline__ void multiply_foresight(const Foresight& f,
                                                   const RowStager<1, true, Form::kNumbers>& rows,
                                                   const View& view, uint32_t x_at,
                                                   RingEnd<Form::kNumbers>& ring, RoundSums<1>& sums,
                                                   LaunchNumber launch) {
  rows.stage_with_residual(view.out, {view.units, view.outputs / kUnit}, view.chunks, f.row_chunks);
  multiply_pieces(f, ring, x_at, sums, launch);
}

template <class A>
inline constexpr bool kIsAdapted = std::is_same_v<A, AdaptedArguments>;

__device__ __forceinline__ void await_gains() {
  wait_copies<0>();
  sync_consumers();
}

// The x of a phase, when it is there, and the sums of its squares.
template <int T, bool kHasExperts, Form kForm>
__device__ __forceinline__ void stage(const RowStager<T, kHasExperts, kForm>& rows, const View& view,
                                      const XPlace<kForm>& x, LaunchNumber launch, int warp, int lane,
                                      float (&shared_squares)[kMostChainedRows][kWarps]) {
  float squares[T] = {};
  if (view.from == nullptr)
    rows.stage_attended(view.units, view.chunks);
  else
    rows.stage_published(view, view.units, view.chunks, view.gain, launch, squares);
  if (view.gain >= 0) store_squares(squares, warp, lane, shared_squares);
#pragma unroll 1
  for (int chunk = 0; goes_by_stages(kForm) && chunk < view.chunks; ++chunk) x.of_stage(chunk).prepare(lane);
}

// The tiles of a round, stage by stage along k.
template <int T, Form kForm>
__device__ __forceinline__ void multiply_round(RingEnd<kForm>& ring, int count, int chunks,
                                               const XPlace<kForm>& x, int lane, float* to, int& left,
                                               Weights<kForm>& w) {
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk)
    multiply_stages<kForm>(ring, count, x.of_stage(chunk), chunk > 0, lane % 4 < T, to, left, w);
}

template <int T, bool kHasExperts, Form kForm>
using Stager = std::conditional_t<is_in_bytes<T>(kForm), ByteStager, RowStager<T, kHasExperts, kForm>>;

template <int T, bool kHasExperts, Form kForm>
__device__ __forceinline__ Stager<T, kHasExperts, kForm> stager_of(const Arguments& a, const View& view,
                                                                   const Places& places, uint8_t* shared,
                                                                   LaunchNumber launch, int warp, int lane) {
  if constexpr (is_in_bytes<T>(kForm))
    return {a, view, shared_address(shared + places.rows), launch, warp, lane};
  else
    return {a, shared + places.rows, shared + places.gains, warp, lane};
}

// A phase as a CTA multiplies it.
template <int T, bool kHasExperts, Form kForm, class A>
struct PhaseWork {
  const View& view;
  float (&squares)[kMostChainedRows][kWarps];
  const Stager<T, kHasExperts, kForm>& rows;
  const PhaseDeltas<T, A>& deltas;
  const XPlace<kForm>& x;
  int chunks, first, end;  // of the view, which lies in shared memory: who reads it again waits for it
  bool has_staged;
  bool chooses;              // its first round is of experts that are foreseen
  ByteStager::Asked& asked;  // of x in bytes: for its first stage
};

// All tiles of a phase, round by round. even: the first weights; of experts none are taken yet
template <int T, bool kHasExperts, Form kForm, class A>
__device__ __forceinline__ void multiply_rounds(const A& a, FixedOf<kHasExperts>& fixed,
                                                const PhaseWork<T, kHasExperts, kForm, A>& phase,
                                                RingEnd<kForm>& ring, RoundSums<T>& sums, LaunchNumber launch,
                                                int warp, int lane, Weights<kForm>& even,
                                                Weights<kForm>& odd) {
  const View& view = phase.view;
  const XPlace<kForm>& x = phase.x;
  auto& squares = phase.squares;
  const int chunks = phase.chunks, end = phase.end, thread = warp * kWarp + lane;
  int tile = phase.first;
  bool is_open = phase.chooses;
  int left = (end - tile) * chunks;  // stages
#pragma unroll 1
  do {
    const int count = min(kRoundTiles, end - tile);
    Element<kForm, kIsAdapted<A>> element(view, T, tile, count, thread, kHasExperts ? view.leading : -1);
    phase.deltas.ask(element, view);
    if constexpr (!kHasExperts && !is_in_bytes<T>(kForm))
      if (tile == view.first && !phase.has_staged) stage(phase.rows, view, x, launch, warp, lane, squares);
    if constexpr (is_in_bytes<T>(kForm)) {
      const bool is_first = tile == phase.first;
      float square[1] = {multiply_byte_round(phase.rows, is_first, ring, count, chunks, x.begin, x.sums,
                                             lane % 4 < T, sums.place(warp, lane), left, even, phase.asked)};
      if (is_first && view.gain >= 0) store_squares(square, warp, lane, squares);
    } else if constexpr (goes_by_stages(kForm)) {
      multiply_round<T>(ring, count, chunks, x, lane, sums.place(warp, lane), left, even);
    } else if constexpr (kHasExperts) {
      multiply_pairs<kForm>(ring, count, chunks, x.begin, lane % 4 < T, sums.place(warp, lane));
    } else {
      multiply_tiles<kForm>(ring, count, chunks, x, lane % 4 < T, sums.place(warp, lane), left, even, odd);
    }
    if (tile == view.first) phase.deltas.collect(launch, thread);
    sync_consumers();
    const float* counts = nullptr;
    if constexpr (kHasExperts) {
      counts = fixed.chosen.counts;
      if (is_open) {  // the round may be of experts that the router does not choose
        is_open = false;
        fixed.chosen.counted.wait(0);
        if (fixed.chosen.discards) continue;
      }
    }
    if (warp < T * (kPlaces / kWarp))
      element.store(view, a.activation, sums.get(), squares, launch, a.tap, counts, phase.deltas.shrunk());
    sums.turn();
    tile += kRoundTiles;
  } while (tile < end);
}

// By the warps that multiply. kPerLane: experts that a lane looks at to choose; 0: there are none
template <int T, int kPerLane, Form kForm, class A>
__device__ __forceinline__ void multiply(const A& a, const Places& places, uint8_t* shared,
                                         LaunchNumber launch) {
  constexpr bool kHasExperts = kPerLane > 0;
  auto& fixed = *reinterpret_cast<FixedOf<kHasExperts>*>(shared + places.fixed);
  const int lane = kept(threadIdx.x % kWarp), warp = kept(threadIdx.x / kWarp), thread = warp * kWarp + lane;
  using Order = Order<kHasExperts>;
  RingEnd<kForm> ring(fixed.ring, shared_address(shared), warp, lane, a.stages);
  RoundSums<T> sums(shared + places.parts);
  // Loops stay loops: most of the time of so short a kernel can go into fetching its instructions.
#pragma unroll 1
  for (int i = 0; i < a.num_phases; ++i) {
    const View& view = fixed.views[i];
    // The router's x is that of gate and up: all stage it there.
    const bool is_router = kHasExperts && i == Order::kRouter, chooses = kHasExperts && i == Order::kGate;
    const bool foresees = kHasExperts && i == 0 && a.foresight.pieces > 0;
    auto& squares = fixed.squares[kHasExperts ? max(i, Order::kGate) : i];  // the router's are those of gate
    const int chunks = view.chunks, first = view.first, end = view.end;
    if constexpr (!is_in_bytes<T>(kForm))
      if (i == 1) await_gains();  // none is needed before
    const PhaseDeltas<T, A> deltas(a, *reinterpret_cast<SharedDeltas*>(shared + places.deltas), i);
    const bool has_staged = is_router || chooses || foresees || deltas.has_tile();
    const int row_chunks = foresees ? a.foresight.row_chunks : is_in_bytes<T>(kForm) ? view.kept : chunks;
    const auto x = XPlace<kForm>::template of<T>(a, places, shared, row_chunks, warp, lane);
    const auto rows = stager_of<T, kHasExperts, kForm>(a, view, places, shared, launch, warp, lane);
    if constexpr (kHasExperts) {
      if (foresees) multiply_foresight(a.foresight, rows, view, x.begin, ring, sums, launch);
      // Not among tiles: it needs the registers that they have.
      if (is_router || (!has_staged && first < end)) stage(rows, view, x, launch, warp, lane, squares);
    }
    if (first == end && !deltas.has_tile()) continue;
    ByteStager::Asked asked;
    if constexpr (is_in_bytes<T>(kForm)) rows.ask(0, asked);  // they come while weights are waited for
    Weights<kForm> even, odd;
    if constexpr (!kHasExperts) ring.take(even);  // the first ones, before x is there
    if constexpr (kIsAdapted<A>) {
      if (deltas.has_tile()) {
        stage(rows, view, x, launch, warp, lane, squares);
        int left = chunks;
        multiply_tiles<kForm>(ring, 1, chunks, x, lane % 4 < T, sums.place(warp, lane), left, even, odd);
        sync_consumers();
        deltas.publish(sums.turn(), norm_scale(view, squares, deltas.token()), launch, thread);
        if (first == end) continue;
        ring.take(even);
      }
    }
    const PhaseWork<T, kHasExperts, kForm, A> phase{view,  squares, rows,       deltas,  x,    chunks,
                                                    first, end,     has_staged, chooses, asked};
    multiply_rounds(a, fixed, phase, ring, sums, launch, warp, lane, even, odd);
  }
}

// By the thread that asks for weights, where there are experts.
__device__ __forceinline__ void read_expert_weights(const Arguments& a, ExpertFixed& fixed,
                                                    uint32_t ring_at) {
  using Order = Order<true>;
  const View& gate = fixed.views[Order::kGate];
  const int all = stages_of(gate), ahead = stages_ahead(a.foresight, gate);
  Reader<Form::kNumbers, true> reader(a, fixed.ring, ring_at);
  reader.read_pieces(a.foresight);
  reader.read(fixed.views[0], a.weights[0]);
  reader.read(fixed.views[Order::kRouter], a.weights[Order::kRouter]);
  const int leading = ahead > 0 && gate.leading >= 0 ? gate.chunks : 0;
  reader.read_gates(gate, fixed.foreseen.ids, 0, leading);  // of nobody who is foreseen
  if (ahead > 0) fixed.foreseen.there.wait(0);
  reader.read_gates(gate, fixed.foreseen.ids, leading, ahead);
  fixed.chosen.there.wait(0);
  reader.read_gates(gate, fixed.chosen.ids, fixed.chosen.discards ? 0 : ahead, all);
  reader.read_downs(fixed.views[Order::kDown], a.weights[Order::kDown], a.shared[1], fixed.chosen.ids);
  if (a.num_phases > Order::kNext) reader.read(fixed.views[Order::kNext], a.weights[Order::kNext]);
}

// By the thread that asks for weights.
template <Form kForm, class A>
__device__ __forceinline__ void read_weights(const A& a, Fixed& fixed, const SharedDeltas& deltas,
                                             uint32_t ring_at) {
  Reader<kForm> reader(a, fixed.ring, ring_at);
  if constexpr (kIsAdapted<A>) {
#pragma unroll 1
    for (int i = 0; i < a.num_phases; ++i) {
      if (deltas.tiles[i].row >= 0) reader.read_rows(fixed.views[i].chunks, a.a[i], deltas.tiles[i].row);
      reader.read(fixed.views[i], a.weights[i]);
    }
  } else if constexpr (is_grouped(kForm)) {
#pragma unroll 1
    for (int i = 0; i < a.num_phases; ++i) reader.read(fixed.views[i], a.weights[i], a.groups[i]);
    let_next_start();  // it need not wait for the end of what is asked for ahead
    if (a.ahead.codes != nullptr) reader.read_ahead(fixed.views[0], fixed.views[1], a.ahead);
  } else {
#pragma unroll 1
    for (int i = 0; i < a.num_phases; ++i) reader.read(fixed.views[i], a.weights[i]);
  }
}

// By one thread.
template <bool kHasExperts>
__device__ __forceinline__ void init_barriers(FixedOf<kHasExperts>& fixed, int stages) {
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    fixed.ring.full[i].init(1);
    fixed.ring.empty[i].init(kWarps);
  }
  if constexpr (kHasExperts) {
    fixed.chosen.there.init(1);
    fixed.chosen.counted.init(1);
    fixed.foreseen.there.init(1);
  }
  publish_barriers();
}

// With adapters, or codes, it has more to hold than registers for two of it on a multiprocessor.
template <int T, int kPerLane, Form kForm, class A>
__global__ __launch_bounds__(threads_of(kPerLane > 0),
                             kIsAdapted<A> || kForm != Form::kNumbers
                                 ? 1
                                 : 2) void skinny_chain_kernel(const __grid_constant__ A a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Order = Order<(kPerLane > 0)>;
  const Places places(kForm, a.stages, T, a.row_pitch, a.gain_bytes, a.delta_bytes);
  auto& fixed = *reinterpret_cast<FixedOf<(kPerLane > 0)>*>(shared + places.fixed);
  SharedDeltas& deltas = *reinterpret_cast<SharedDeltas*>(shared + places.deltas);
  if (a.lets_next_in_early) let_next_start();
  if (threadIdx.x == kConsumers) init_barriers<(kPerLane > 0)>(fixed, a.stages);
  if constexpr (kPerLane > 0) {
    const int phase = static_cast<int>(threadIdx.x);
    if (phase < a.num_phases) fixed.views[phase] = expert_view(a, phase);
    if (phase == kConsumers + kWarp) fixed.choice = ChoiceView::of(a, expert_view(a, Order::kGate));
  } else if (threadIdx.x < a.num_phases) {
    fixed.views[threadIdx.x] = View::of<kForm>(a.phases[threadIdx.x], static_cast<int>(blockIdx.x),
                                               threadIdx.x < Order::kNext ? 0 : 1,
                                               threadIdx.x == Order::kDown && a.tap.ring_rows != nullptr);
  }
  if constexpr (kIsAdapted<A>) {
    const unsigned phase = threadIdx.x - kWarp;
    if (phase < static_cast<unsigned>(a.num_phases)) deltas.tiles[phase] = tile_of(a, a.deltas[phase]);
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if constexpr (kPerLane > 0) {
      if (threadIdx.x >= kConsumers + kWarp) return choose_experts<kPerLane>(fixed, a.launches + blockIdx.x);
    }
    if (threadIdx.x > kConsumers) return;
    if constexpr (kPerLane > 0)
      read_expert_weights(a, fixed, shared_address(shared));
    else
      read_weights<kForm>(a, fixed, deltas, shared_address(shared));
    let_next_start();
    return;
  }
  if constexpr (is_in_bytes<T>(kForm)) {
    if (threadIdx.x == 0) ask_gain_ahead(a.phases[Order::kGate]);
    if (threadIdx.x == 0) ask_gain_ahead(a.phases[Order::kNext]);
  } else {
    ask_gain<kForm>(a.phases[Order::kGate], shared + places.gains);
    if (a.num_phases > Order::kNext)
      ask_gain<kForm>(a.phases[Order::kNext], shared + places.gains + a.gain_bytes);
    commit_copies();
  }
  if constexpr (kIsAdapted<A>) {
    stage_ranks(a, deltas);
    sync_consumers();
  }
  wait_for_previous();
  uint32_t* launches = a.launches + blockIdx.x;
  const LaunchNumber launch(__ldcg(launches));
  multiply<T, kPerLane, kForm>(a, places, shared, launch);
  sync_consumers();
  if (threadIdx.x > 0) return;
  if constexpr (kPerLane > 0) fixed.chosen.counted.wait(0);
  *launches = launch.get();  // all have read the number
}

template <int T, int kPerLane, Form kForm, class A>
void launch_rows(const A& a, int grid, Stream stream) {
  constexpr auto kKernel = skinny_chain_kernel<T, kPerLane, kForm, A>;
  const Places places(kForm, a.stages, T, a.row_pitch, a.gain_bytes, a.delta_bytes);
  const LaunchShape shape{.grid = static_cast<unsigned>(grid),
                          .block = threads_of(kPerLane > 0),
                          .shared_bytes = static_cast<size_t>(places.total),
                          .overlaps_previous = true};
  // The room beside it is for other kernels, not for a cache that it does not use.
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
  launch(kKernel, shape, stream, a);
}

template <Form kForm, class A>
void launch_of(const A& a, int grid, Stream stream) {
  switch (a.num_tokens) {
    case 1:
      return launch_rows<1, 0, kForm>(a, grid, stream);
    case 2:
      return launch_rows<2, 0, kForm>(a, grid, stream);
    case 3:
      return launch_rows<3, 0, kForm>(a, grid, stream);
    default:
      return launch_rows<4, 0, kForm>(a, grid, stream);
  }
}

}  // namespace

void launch_chain(const Arguments& a, Form form, int grid, Stream stream) {
  constexpr Form kNumbers = Form::kNumbers;
  if (a.num_experts > kMostRouted / 2) return launch_rows<1, kMostRouted / kWarp, kNumbers>(a, grid, stream);
  if (a.num_experts > 0) return launch_rows<1, kMostRouted / kWarp / 2, kNumbers>(a, grid, stream);
  form == Form::kFloat8 ? launch_of<Form::kFloat8>(a, grid, stream) : launch_of<kNumbers>(a, grid, stream);
}

void launch_adapted_chain(const AdaptedArguments& a, int grid, Stream stream) {
  launch_of<Form::kNumbers>(a, grid, stream);
}

void launch_grouped_chain(const GroupedArguments& a, Form form, int grid, Stream stream) {
  if (form == Form::kFine4) return launch_of<Form::kFine4>(a, grid, stream);
  if (form == Form::kFine8) return launch_of<Form::kFine8>(a, grid, stream);
  if (form == Form::kFineFloat8) return launch_of<Form::kFineFloat8>(a, grid, stream);
  launch_of<Form::kInt4>(a, grid, stream);
}

}  // namespace chain
}  // namespace bequest::cuda
