#include <cstdlib>

#include "cache/cuda/kv_copy.h"
#include "device/launch.cuh"

namespace bequest::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // 16-byte vectors in flight per thread
constexpr int kVectorsPerBlock = kThreads * kUnroll;

__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(const BlockCopyParams p) {
  const int64_t source = p.pairs[2 * blockIdx.x];
  const int64_t destination = p.pairs[2 * blockIdx.x + 1];
  if (source < 0) return;
  const int64_t num_vectors = static_cast<int64_t>(p.block_bytes / sizeof(uint4));
  const uint4* from = static_cast<const uint4*>(p.cache) + source * num_vectors;
  uint4* to = static_cast<uint4*>(p.cache) + destination * num_vectors;
  const int64_t first = int64_t{blockIdx.y} * kVectorsPerBlock + threadIdx.x;
  uint4 vectors[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i)
    if (first + i * kThreads < num_vectors) vectors[i] = from[first + i * kThreads];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i)
    if (first + i * kThreads < num_vectors) to[first + i * kThreads] = vectors[i];
}

// A step's arrays and its results, with room: the bus takes three microseconds for as many.
constexpr size_t kMostByKernel = 128 * 1024;

// Either side may be pinned host memory, which has the same address on the device.
__global__ void __launch_bounds__(kThreads)
    copy_bytes_kernel(char* __restrict__ to, const char* __restrict__ from, size_t num_bytes) {
  const size_t at = (size_t{blockIdx.x} * kThreads + threadIdx.x) * sizeof(uint4);
  if (at + sizeof(uint4) <= num_bytes) {
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
  } else {
    for (size_t i = at; i < num_bytes; ++i) to[i] = from[i];
  }
}

}  // namespace

void copy_blocks(const BlockCopyParams& p, Stream stream) {
  check(p.block_bytes % sizeof(uint4) == 0 && is_aligned(p.cache, sizeof(uint4)),
        "copy_blocks: blocks are not multiples of 16 bytes");
  const auto parts =
      static_cast<unsigned>(ceil_div(static_cast<int64_t>(p.block_bytes / sizeof(uint4)), kVectorsPerBlock));
  launch(copy_blocks_kernel, {{static_cast<unsigned>(p.num_pairs), parts}, kThreads}, stream, p);
}

void swap_blocks(const BlockSwapParams& p, Stream stream) {
  for (int64_t i = 0; i < p.num_pairs; ++i)
    check(p.pairs[2 * i] >= 0 && p.pairs[2 * i] < p.source_blocks && p.pairs[2 * i + 1] >= 0 &&
              p.pairs[2 * i + 1] < p.destination_blocks,
          "swap_blocks: a block is outside its cache");
  int64_t begin = 0;
  while (begin < p.num_pairs) {
    int64_t end = begin + 1;  // [begin, end) are neighbours on both sides: one copy
    while (end < p.num_pairs && p.pairs[2 * end] == p.pairs[2 * end - 2] + 1 &&
           p.pairs[2 * end + 1] == p.pairs[2 * end - 1] + 1)
      ++end;
    const char* from = static_cast<const char*>(p.source) + p.pairs[2 * begin] * p.block_bytes;
    char* to = static_cast<char*>(p.destination) + p.pairs[2 * begin + 1] * p.block_bytes;
    check_cuda(cudaMemcpyAsync(to, from, (end - begin) * p.block_bytes, cudaMemcpyDefault, stream));
    begin = end;
  }
}

void copy_bytes(void* destination, const void* source, size_t num_bytes, Stream stream) {
  const bool lab = getenv("LAB_COPIES") == nullptr || getenv("LAB_COPIES")[0] != '0';
  const bool aligned = is_aligned(destination, sizeof(uint4)) && is_aligned(source, sizeof(uint4));
  if (lab && num_bytes <= kMostByKernel && aligned) {
    const auto grid =
        static_cast<unsigned>(ceil_div(static_cast<int64_t>(num_bytes), kThreads * sizeof(uint4)));
    launch(copy_bytes_kernel, {grid, kThreads}, stream, static_cast<char*>(destination),
           static_cast<const char*>(source), num_bytes);
    return;
  }
  check_cuda(cudaMemcpyAsync(destination, source, num_bytes, cudaMemcpyDefault, stream));
}

}  // namespace bequest::cuda
