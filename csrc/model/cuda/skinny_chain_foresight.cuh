// Which experts the row of skinny_chain.cu is likely to take, known before the router has spoken: the
// residual that it looks at is linear in what attention gives, and the factor of a norm does not change who
// is best.
//   Wr diag(g) (residual + Wo attended) = F [attended | residual]
// So F is multiplied first, while all else waits for the output product and its exchange. Its pieces are
// stages of tiles, one to a CTA: sums of parts of k are exchanged, and who draws adds them up.
//
// The warp that asks for weights draws. What it then asks for is right but for near ties. Results depend on
// the router alone: if it chooses others, the stages that were asked for are given back unread. So it does
// not matter that another CTA may have added to the residual already when this one reads it.
#pragma once

#include "device/exchange.cuh"
#include "device/reductions.cuh"
#include "model/cuda/skinny_chain.cuh"
#include "model/cuda/skinny_chain_results.cuh"
#include "model/cuda/skinny_chain_rows.cuh"
#include "model/cuda/skinny_chain_sums.cuh"
#include "model/cuda/skinny_chain_weights.cuh"

namespace bequest::cuda::chain {

inline constexpr int kQuad = 4;  // experts that follow each other lie in a lane: two words
inline constexpr uint32_t kNobody = 0;

// --- drawing, by a warp ---------------------------------------------------------------------------------

// The best of the warp's keys, which is taken out.
template <int kPerLane>
__device__ __forceinline__ uint32_t draw_best(uint32_t (&keys)[kPerLane]) {
  uint32_t best = keys[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) best = max(best, keys[i]);
  best = __reduce_max_sync(kAllLanes, best);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (keys[i] == best) keys[i] = kNobody;
  return best;
}

// The best `count` of them, best first: lane l has that of rank l, and those beyond have the best.
template <int kPerLane>
__device__ __forceinline__ uint32_t draw(uint32_t (&keys)[kPerLane], int count, int lane) {
  uint32_t mine = draw_best(keys);
#pragma unroll 1
  for (int rank = 1; rank < count; ++rank) {
    const uint32_t best = draw_best(keys);
    if (lane == rank) mine = best;
  }
  return __shfl_sync(kAllLanes, mine, lane < count ? lane : 0);
}

// How many of the first `count` lanes have smaller ids.
__device__ __forceinline__ int place_by_id(int id, int count) {
  int place = 0;
#pragma unroll 1
  for (int rank = 0; rank < count; ++rank) place += __shfl_sync(kAllLanes, id, rank) < id ? 1 : 0;
  return place;
}

// --- F [attended | residual] ----------------------------------------------------------------------------

// By the warps that multiply, whose x is staged.
__device__ __forceinline__ void multiply_pieces(const Foresight& f, RingEnd<Form::kNumbers>& ring,
                                                uint32_t x_at, RoundSums<1>& sums, LaunchNumber launch,
                                                int thread) {
  constexpr int kStageBytesOfX = kStageUnits<Form::kNumbers> * kSliceBytes;
  const int warp = thread / kWarp, lane = thread % kWarp;
#pragma unroll 1
  for (int index = Piece::first(); index < f.pieces; index += static_cast<int>(gridDim.x)) {
    const Piece piece = Piece::of(f, index);
    TileSum sum;
#pragma unroll 1
    for (int chunk = piece.begin; chunk < piece.begin + piece.count; ++chunk) {
      Weights<Form::kNumbers> weights;
      Row<Form::kNumbers> x;
      ring.take(weights);
      x.load(x_at + chunk * kStageBytesOfX, 0);
      sum.add(weights, x);
      ring.give_back(weights);
    }
    if (lane % 4 == 0) *sums.place(warp, lane) = sum.total();
    sync_consumers();
    const float* const parts = sums.turn();
    if (thread >= kTile) continue;
    const float total = sum_of_warps([&](int of) { return parts[of * kPartPitch + thread]; });
    store_word(word_at(f.words, piece.part * f.rows + piece.row + thread), __float_as_uint(total),
               launch.get());
  }
}

// --- who is foreseen ------------------------------------------------------------------------------------

// Larger sums have larger keys. The last byte says whose it is.
__device__ __forceinline__ uint32_t key_of_sum(float sum, int expert) {
  static_assert(kMostRouted <= 256);
  const uint32_t bits = __float_as_uint(sum), ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (ordered & 0xffffff00u) | (255u - static_cast<uint32_t>(expert));
}

// Sums of all parts, when they are there: lane l has those of experts 4 l to 4 l + 3, and of 128 further on.
template <int kPerLane>
__device__ __forceinline__ void load_sums(const Foresight& f, uint32_t launch, int lane,
                                          float (&sums)[kPerLane]) {
  constexpr int kPairs = kPerLane / 2, kAtOnce = BATCH / kPairs;  // parts: as many as there are registers for
#pragma unroll 1
  for (int part = 0; part < f.parts; part += kAtOnce) {
    uint4 words[kAtOnce][kPairs] = {};
    bool lacks_any;
    Patience patience;
    do {
      lacks_any = false;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int expert = i / 2 * (kQuad * kWarp) + lane * kQuad + i % 2 * 2;
          const bool exists = part + p < f.parts && expert < f.rows;
          const uint8_t* at =
              reinterpret_cast<const uint8_t*>(f.words) + place_of_word((part + p) * f.rows + expert);
          if (exists && (words[p][i].y != launch || words[p][i].w != launch)) {
            words[p][i] = load_words(at);
            lacks_any = true;
          }
        }
      patience.spend();
    } while (lacks_any);
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p)
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        sums[2 * i] += __uint_as_float(words[p][i].x);
        sums[2 * i + 1] += __uint_as_float(words[p][i].z);
      }
  }
}

// By a warp.
template <int kPerLane>
__device__ __forceinline__ void foresee(const Arguments& a, uint32_t launch, int lane, Foreseen& foreseen) {
  float sums[kPerLane] = {};
  load_sums<kPerLane>(a.foresight, launch, lane, sums);
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i / kQuad * (kQuad * kWarp) + lane * kQuad + i % kQuad;
    keys[i] = expert < a.num_experts ? key_of_sum(sums[i], expert) : kNobody;
  }
  const uint32_t mine = draw(keys, a.num_chosen, lane);
  const int id = static_cast<int>(255u - (mine & 255u)), place = place_by_id(id, a.num_chosen);
  if (lane >= a.num_chosen) return;
  foreseen.ids[place] = id;
  foreseen.there.arrive();
}

// --- what is asked for ahead ----------------------------------------------------------------------------

__device__ __forceinline__ int stages_of(const View& view) { return (view.end - view.first) * view.chunks; }

// Of a CTA's stages of gate and up.
__device__ __forceinline__ int stages_ahead(const Arguments& a, const View& gate) {
  return min(a.foresight.stages, stages_of(gate));
}

// The ranks that these are of.
class RanksAhead {
 public:
  __device__ RanksAhead(const Arguments& a, const View& gate) {
    const int stages = stages_ahead(a, gate), tiles = gate.part / (kTile / 2);
    if (stages == 0) return;
    first_ = gate.first / tiles;
    last_ = (gate.first + (stages - 1) / gate.chunks) / tiles;
  }

  // Whether one of them is of another expert than was foreseen. By the warp that has chosen; place: of a
  // lane's expert, if it has one
  __device__ __forceinline__ bool differ(const Foreseen& foreseen, bool has_one, int id, int place) const {
    if (last_ < 0) return false;
    foreseen.there.wait(0);
    const bool is_ahead = has_one && place >= first_ && place <= last_;
    return __any_sync(kAllLanes, is_ahead && foreseen.ids[place] != id);
  }

 private:
  int first_ = 0, last_ = -1;
};

}  // namespace bequest::cuda::chain
