// The parts of sums that the CTAs of a cluster have in tile_linear.cuh, and how they meet.
//
// Eight rows of W are a band; of a gated product a band of the gate and the same of up belong together. Each
// CTA finishes some bands, and the others send it what they have summed of them. Parts complete on a barrier
// of the CTA that gets them: nobody waits for a whole cluster, and no part is read from far away.
#pragma once

#include "device/barriers.cuh"
#include "device/cluster.cuh"
#include "device/reductions.cuh"
#include "device/shared_memory.cuh"
#include "ops/cuda/skinny_linear.h"
#include "ops/cuda/tile_sums.cuh"

namespace bequest::cuda::tiles {

// A CTA's shared memory, places in bytes behind the ring's beginning, and how much of a tile it finishes.
struct TileMemory {
  int stages;
  int parts;       // what it has to add: behind the ring, or 0: in the ring's place, when that has been read
  int squares;     // the same of the squares of x, where they are wanted
  int share_bits;  // a CTA finishes 2 to this bands

  __device__ bool has_parts_apart() const { return parts > 0; }
};

template <class Size>
struct Bands {
  static constexpr uint32_t kRows = 8, kPairs = kRows / 2;  // of W
  static constexpr uint32_t kCount = Size::kRows / kRows;   // of a tile
  static constexpr uint32_t kOfProduct = kGroupRows / kRows;
  // Floats of a row: what is read at once is in other banks.
  static constexpr uint32_t kPitch = Size::kTokens + 4;
  static constexpr uint32_t kPartBytes = kRows * kPitch * 4;

  // Of two tiles of tokens a lane has four values of a row, which lie side by side. place: in a row
  __device__ static __forceinline__ uint32_t token_at(uint32_t place) {
    if constexpr (Size::kTokens == kTile) return place;
    return place / 16 * 16 + place / 2 % 2 * 8 + place / 4 % 4 * 2 + place % 2;
  }
};

template <class Size, bool kNorm>
class Parts {
 public:
  using Band = Bands<Size>;
  // Where a lane's values of a band go, and what they complete on.
  struct Way {
    uint32_t to, arrived;
  };
  // Slices have a half of the 16 rows of a warp each.
  static constexpr uint32_t kHalves = 2 / Size::kSlices;
  using Ways = Way[Size::kHeight][kHalves];

  // warpgroup: of the thread
  __device__ Parts(const SkinnyLinearParams& p, const TileMemory& memory, uint32_t address,
                   PhaseBarrier& arrived, int warpgroup)
      : p_(p),
        arrived_(arrived),
        address_(address + memory.parts),
        squares_(address + memory.squares),
        splits_(gridDim.x),
        share_bits_(memory.share_bits),
        dealt_(p.result == SkinnyResult::kGate ? Band::kCount / 2 : Band::kCount),
        slice_(warpgroup / Size::kReaders),
        reader_(warpgroup % Size::kReaders) {}

  // Bands that this CTA finishes, and the first of them.
  __device__ __forceinline__ uint32_t num_bands() const {
    return first_band() < dealt_ ? 1u << share_bits_ : 0;
  }
  __device__ __forceinline__ uint32_t first_band() const { return blockIdx.x << share_bits_; }

  // By one thread, before anything can arrive.
  __device__ __forceinline__ void expect() const {
    const uint32_t bands = num_bands() * (Band::kCount / dealt_);
    const uint32_t squares = kNorm ? Size::kSlices * Size::kTokens : 0;
    const uint32_t floats = bands * Band::kRows * Size::kTokens + squares;
    arrived_.arrive_expecting(splits_ * floats * 4);
  }

  __device__ __forceinline__ void find(Ways& ways, uint32_t thread) const {
    const uint32_t lane = thread % kWarp, warp = thread / kWarp % 4;
    const uint32_t mine = address_ + blockIdx.x * Band::kPartBytes + lane / 4 * (Band::kPitch * 4) +
                          lane % 4 * (Size::kTokens > kTile ? 16 : 8);
#pragma unroll
    for (uint32_t height = 0; height < Size::kHeight; ++height)
#pragma unroll
      for (uint32_t half = 0; half < kHalves; ++half) {
        const uint32_t band =
            (reader_ * Size::kHeight + height) * Band::kOfProduct + warp * 2 + half + slice_;
        const uint32_t up = band >= dealt_ ? 1 : 0, dealt = band - up * dealt_;
        const uint32_t theirs = dealt & ((1u << share_bits_) - 1);
        Way& way = ways[height][half];
        way.to = mine + place_of(theirs, up);
        way.arrived = arrived_.address();
        if (splits_ > 1) {
          const int owner = static_cast<int>(dealt >> share_bits_);
          way.to = address_in_block(way.to, owner), way.arrived = address_in_block(way.arrived, owner);
        }
        if constexpr (Size::kHasRoom) asm volatile("" : "+r"(way.to), "+r"(way.arrived));
      }
  }

  // What a warpgroup has summed. REQUIRES: nobody reads any more what lies where parts come to
  __device__ __forceinline__ void send(const Sums<Size>& sums, const Ways& ways) const {
    if (splits_ > 1)
      send_by(sums, ways,
              [](const auto& values, uint32_t to, uint32_t arrived) { send_async(to, values, arrived); });
    else
      send_by(sums, ways, [](const auto& values, uint32_t to, uint32_t) { store(to, values); });
  }

  // Squares of x that are on their way: eight lanes have a token, and the lanes of all warpgroups and CTAs
  // divide what there is of it.
  struct Squares {
    static constexpr uint32_t kGroups = 16 * Size::kReaders;  // of eight lanes
    static constexpr uint32_t kCount = Size::kTokens > kGroups ? Size::kTokens / kGroups : 1;
    const float4* from;  // of the lane's first token
    uint32_t existing;   // of its tokens: bits
    float4 first[kCount];
  };
  // Behind the predecessor's end. They arrive while the products run.
  __device__ __forceinline__ Squares begin_squares(int first_token, int num_tokens) const {
    Squares squares{};
    if constexpr (kNorm) {
      const uint32_t first = reader_ * 16 + threadIdx.x % kWarpgroup / 8;
      squares.from = reinterpret_cast<const float4*>(p_.squares) + int64_t{first_token + first} * pieces();
#pragma unroll
      for (uint32_t i = 0; i < Squares::kCount; ++i) {
        if (static_cast<int>(first + i * Squares::kGroups) < num_tokens) squares.existing |= 1u << i;
        squares.first[i] = load_squares(squares, i, sharer());
      }
    }
    return squares;
  }
  // Each of eight lanes sends their sum to another CTA.
  __device__ __forceinline__ void send_squares(const Squares& squares) const {
    const uint32_t rank = threadIdx.x % 8, first = reader_ * 16 + threadIdx.x % kWarpgroup / 8;
#pragma unroll
    for (uint32_t i = 0; i < Squares::kCount; ++i) {
      float sum = total(squares.first[i]);
#pragma unroll 1
      for (uint32_t piece = sharer() + sharers(); piece < pieces(); piece += sharers())
        sum += total(load_squares(squares, i, piece));
#pragma unroll
      for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
      const uint32_t token = first + i * Squares::kGroups;
      if (rank >= splits_ || token >= Size::kTokens) continue;
      const uint32_t at = squares_ + ((blockIdx.x * Size::kSlices + slice_) * Size::kTokens + token) * 4;
      if (splits_ > 1)
        send_async(address_in_block(at, rank), __float_as_uint(sum),
                   address_in_block(arrived_.address(), rank));
      else
        store_4(at, __float_as_uint(sum));
    }
  }

  // Until all parts are there. By all threads.
  __device__ __forceinline__ void await() const {
    if (splits_ > 1)
      arrived_.wait(0);
    else
      __syncthreads();
  }

  // Where the parts of the CTA's band `band` are, of a gated product of the gate or of up.
  __device__ __forceinline__ uint32_t of_band(uint32_t band, uint32_t up) const {
    return address_ + place_of(band, up);
  }
  // The sums of two rows of a token, always in the same order.
  __device__ __forceinline__ float2 sum(uint32_t at) const {
    float2 sum{};
#pragma unroll 2
    for (uint32_t split = 0; split < splits_; ++split) {
      sum.x += __uint_as_float(load_4(at)), sum.y += __uint_as_float(load_4(at + Band::kPitch * 4));
      at += Band::kPartBytes;
    }
    return sum;
  }
  // Of x, of a token.
  __device__ __forceinline__ float square(uint32_t token) const {
    float sum = 0;
    uint32_t at = squares_ + token * 4;
#pragma unroll 2
    for (uint32_t split = 0; split < splits_; ++split) {
      float part = 0;
#pragma unroll
      for (int slice = 0; slice < Size::kSlices; ++slice, at += Size::kTokens * 4)
        part += __uint_as_float(load_4(at));
      sum += part;
    }
    return sum;
  }

 private:
  __device__ __forceinline__ uint32_t place_of(uint32_t band, uint32_t up) const {
    const uint32_t index = dealt_ == Band::kCount ? band : band * 2 + up;
    return index * (splits_ * Band::kPartBytes);
  }

  // Of the squares of a token, four at a time.
  __device__ __forceinline__ uint32_t pieces() const { return static_cast<uint32_t>(p_.in_features) / 32; }
  __device__ __forceinline__ uint32_t sharers() const { return splits_ * Size::kSlices * 8; }
  __device__ __forceinline__ uint32_t sharer() const {
    return (blockIdx.x * Size::kSlices + slice_) * 8 + threadIdx.x % 8;
  }
  __device__ __forceinline__ float4 load_squares(const Squares& squares, uint32_t i, uint32_t piece) const {
    const bool exists = piece < pieces() && (squares.existing >> i & 1) != 0;
    return exists ? __ldcg(squares.from + i * Squares::kGroups * pieces() + piece) : float4{};
  }
  __device__ static __forceinline__ float total(const float4& four) {
    return (four.x + four.y) + (four.z + four.w);
  }

  // leave(values, to, arrived)
  template <class Leave>
  __device__ static __forceinline__ void send_by(const Sums<Size>& sums, const Ways& ways,
                                                 const Leave& leave) {
#pragma unroll
    for (int height = 0; height < Size::kHeight; ++height)
#pragma unroll
      for (uint32_t half = 0; half < kHalves; ++half) {
        const float (&of)[Size::kSums] = sums.of[height];
        const Way& way = ways[height][half];
        if constexpr (Size::kTokens == kTile) {
          leave(float2{of[half * 2], of[half * 2 + 1]}, way.to, way.arrived);
        } else {
#pragma unroll
          for (int i = half * 2; i < Size::kSums; i += 8)
            leave(float4{of[i], of[i + 1], of[i + 4], of[i + 5]}, way.to + i / 8 * 64, way.arrived);
        }
      }
  }
  __device__ static __forceinline__ void store(uint32_t to, const float4& v) {
    store_16(to, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                            __float_as_uint(v.w)));
  }
  __device__ static __forceinline__ void store(uint32_t to, const float2& v) {
    store_4(to, __float_as_uint(v.x)), store_4(to + 4, __float_as_uint(v.y));
  }

  const SkinnyLinearParams& p_;
  PhaseBarrier& arrived_;
  const uint32_t address_, squares_, splits_, share_bits_;
  const uint32_t dealt_;  // bands that are dealt to the CTAs
  const uint32_t slice_, reader_;
};

}  // namespace bequest::cuda::tiles
