// Rows of x on their way into a streamed product: to shared memory, normed there, and into registers.
#pragma once

#include "device/reductions.cuh"
#include "ops/cuda/skinny_norm.cuh"
#include "ops/cuda/skinny_stream.cuh"

namespace bequest::cuda {

// Before the predecessor has ended: the norm's weight to shared memory.
__device__ void stage_gain(const SkinnyLinearParams& p, uint4* gain) {
  if (p.norm_weight == nullptr) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(p.in_features) / kSkinnyWidth; i += kConsumers)
    gain[i] = __ldg(static_cast<const uint4*>(p.norm_weight) + i);
}

// The 16-byte vectors of the rows that a thread has on their way to shared memory. A warp's are of one row.
class RowVectors {
 public:
  // Before the predecessor has ended: a division takes its time.
  __device__ explicit RowVectors(const SkinnyLinearParams& p)
      : vectors_(static_cast<int>(p.in_features) / kSkinnyWidth), num_tokens_(p.num_tokens) {
    const int thread = static_cast<int>(threadIdx.x);
    at_once_ = vectors_ < kConsumers ? kConsumers / vectors_ : 1;
    row_ = vectors_ < kConsumers ? thread / vectors_ : 0;
    first_ = vector_ = thread - row_ * vectors_;
    if (row_ >= at_once_ || vector_ >= vectors_) row_ = num_tokens_;  // none
  }

  __device__ bool done() const { return row_ >= num_tokens_; }
  __device__ int row() const { return row_; }
  __device__ int vector() const { return vector_; }

  __device__ void advance() {
    vector_ += kConsumers;
    if (vector_ < vectors_) return;
    vector_ = first_;
    row_ += at_once_;
  }

 private:
  const int vectors_, num_tokens_;
  int at_once_, row_, first_, vector_;
};

// The rows of x to shared memory, normed if the product has a norm. The squares of each kSkinnyDepthUnit are
// summed by a warp and these sums added in order, whatever the number of rows.
template <int kTokenTiles>
__device__ void stage_rows(const SkinnyLinearParams& p, const Places& places, const RowVectors& mine,
                           uint8_t* shared) {
  constexpr int kBatch = 2 * kTokenTiles;  // loads in flight
  const int vectors = static_cast<int>(p.in_features) / kSkinnyWidth, segments = vectors / kWarp;
  const auto place = [&](const RowVectors& at) {
    return reinterpret_cast<uint4*>(shared + places.rows + at.row() * places.row_pitch) + at.vector();
  };
  auto* squares = reinterpret_cast<float*>(shared + places.squares);
#pragma unroll 1
  for (RowVectors begin = mine; !begin.done();) {
    uint4 values[kBatch] = {};
    RowVectors at = begin;
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (!at.done()) {
        values[b] = __ldcg(static_cast<const uint4*>(p.x) + at.row() * vectors + at.vector());
        at.advance();
      }
    float square[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) square[b] = p.norm_weight != nullptr ? square_sum(values[b]) : 0.0f;
    if (p.norm_weight != nullptr) warp_sums(square);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (begin.done()) break;
      *place(begin) = values[b];
      if (p.norm_weight != nullptr && threadIdx.x % kWarp == 0)
        squares[begin.row() * segments + begin.vector() / kWarp] = square[b];
      begin.advance();
    }
  }
  sync_consumers();
  if (p.norm_weight == nullptr) return;
  const auto* gain = reinterpret_cast<const uint4*>(shared + places.gain);
  const float inverse = 1.0f / static_cast<float>(p.in_features);
  int scaled_row = -1;
  float scale = 0;
#pragma unroll 1
  for (RowVectors at = mine; !at.done(); at.advance()) {
    if (at.row() != scaled_row) {
      scaled_row = at.row();
      float square = 0;
#pragma unroll 4
      for (int segment = 0; segment < segments; ++segment) square += squares[scaled_row * segments + segment];
      scale = rsqrtf(square * inverse + p.eps);
    }
    *place(at) = normed(*place(at), gain[at.vector()], scale);
  }
  sync_consumers();
}

// Rows of x on their way into the tensor cores: a lane's 8 neighbours along k of one row, for each step of a
// chunk. Beside codes it has 16, in two vectors.
template <int kTokenTiles, bool kStaged, bool kCodes>
class Rows {
 public:
  __device__ Rows(const SkinnyLinearParams& p, const Places& places, const uint8_t* shared) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int column =
        warp * (kStepDepth<kCodes> / kWarps) + lane % 4 * (kSkinnyWidth * kStepVectors<kCodes>);
    steps_ = static_cast<int>(p.in_features) / kStepDepth<kCodes>;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const int row = t * kTokenTile + lane / 4;
      is_row_[t] = row < p.num_tokens;
      const uint8_t* begin = kStaged ? shared + places.rows + row * places.row_pitch
                                     : static_cast<const uint8_t*>(p.x) + row * p.in_features * 2;
      row_[t] = reinterpret_cast<const uint4*>(begin + column * 2);
    }
  }

  // Of the chunk's steps; those beyond k and rows beyond the last are zero.
  __device__ __forceinline__ void load(int chunk, uint4 (&to)[kTokenTiles][kChunkVectors<kCodes>]) const {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
      for (int i = 0; i < kChunkVectors<kCodes>; ++i) {
        const int step = chunk * kSteps + i / kStepVectors<kCodes>;
        to[t][i] = make_uint4(0, 0, 0, 0);
        if (is_row_[t] && step < steps_)
          to[t][i] = row_[t][step * (kStepDepth<kCodes> / kSkinnyWidth) + i % kStepVectors<kCodes>];
      }
  }

 private:
  const uint4* row_[kTokenTiles];
  bool is_row_[kTokenTiles];
  int steps_;
};

}  // namespace bequest::cuda
