#include <algorithm>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/gather.h"

namespace bequest::cuda {
namespace {

__device__ __forceinline__ int64_t token_of(const EmbeddingParams& p, int64_t i) {
  const int32_t id = p.ids[i];
  if (id >= 0) return id;
  const int64_t row = -(int64_t{id} + 1);
  return p.last_tokens != nullptr && row < p.num_rows ? p.last_tokens[row] : -1;
}

template <class T, int W>
__global__ void embedding_kernel(const EmbeddingParams p) {
  let_next_start();
  wait_for_previous();
  const int64_t token = token_of(p, blockIdx.x);
  const bool known = token >= 0 && token < p.vocab_size;
  const T* from = static_cast<const T*>(p.weight) + (known ? token : 0) * p.hidden;
  T* to = static_cast<T*>(p.out) + blockIdx.x * p.hidden;
  for (int64_t i = int64_t{threadIdx.x} * W; i < p.hidden; i += int64_t{blockDim.x} * W) {
    float x[W];
    load_vector<T, W>(from + i, x);  // the table may be what the kernel before has written
    if (!known) {
#pragma unroll
      for (int j = 0; j < W; ++j) x[j] = __uint_as_float(0x7fc00000u);
    }
    store_vector<T, W>(to + i, x);
  }
}

template <class T, int W>
void launch_width(const EmbeddingParams& p, Stream stream) {
  const auto threads = static_cast<unsigned>(std::min<int64_t>(round_up(ceil_div(p.hidden, W), kWarp), 256));
  const LaunchShape shape{
      .grid = static_cast<unsigned>(p.num_tokens), .block = threads, .overlaps_previous = true};
  launch(embedding_kernel<T, W>, shape, stream, p);
}

}  // namespace

void embedding(const EmbeddingParams& p, Stream stream) {
  check(p.num_tokens >= 0 && p.hidden >= 1 && p.vocab_size >= 1, "embedding: empty rows");
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    if (p.hidden % kWide == 0 && is_aligned(p.weight, 16) && is_aligned(p.out, 16))
      return launch_width<T, kWide>(p, stream);
    launch_width<T, 1>(p, stream);
  });
}

}  // namespace bequest::cuda
