// A row on its way through a kernel: N vectors of W elements per thread, in registers.
#pragma once

#include "device/reductions.cuh"
#include "device/vectors.cuh"

namespace bequest::cuda {

inline constexpr int kRowWarpsPerBlock = 4;  // where a warp has a row

// Which row this thread works on, and which of its vectors. A row belongs to a warp or to the block.
template <int W, int N, bool kWarpPerRow>
class RowPlace {
 public:
  __device__ explicit RowPlace(int64_t width) : num_vectors_(static_cast<int>(width / W)) {}

  __device__ int64_t row() const { return row_; }
  __device__ bool is_first() const { return first_ == 0; }  // of the row's threads

  // Calls f(n, at) for the n-th of the thread's vectors, which begins with element `at` of the row.
  template <class F>
  __device__ __forceinline__ void for_each_vector(F f) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (first_ + n * step_ < num_vectors_) f(n, (first_ + n * step_) * W);
  }

  // v of all threads of the row, put together by op, in each of them. `shared` holds one element per warp.
  template <class Op>
  __device__ __forceinline__ float reduce(float v, float* shared, Op op) const {
    if constexpr (kWarpPerRow) {
      return warp_reduce(v, op);
    } else {
      return block_reduce(v, shared, op);
    }
  }

 private:
  const int64_t row_ =
      kWarpPerRow ? int64_t{blockIdx.x} * kRowWarpsPerBlock + threadIdx.x / kWarp : blockIdx.x;
  const int first_ = kWarpPerRow ? threadIdx.x % kWarp : threadIdx.x;
  const int step_ = kWarpPerRow ? kWarp : blockDim.x;
  const int num_vectors_;
};

// What is loaded is kept as memory has it, so that more rows find registers at once.
template <class T, int W, int N, bool kWarpPerRow>
__device__ __forceinline__ void load_row(const RowPlace<W, N, kWarpPerRow>& place, const T* from,
                                         Packed<T, W> (&row)[N]) {
  place.for_each_vector([&](int n, int at) { row[n] = load_packed<T, W>(from + at); });
}

}  // namespace bequest::cuda
