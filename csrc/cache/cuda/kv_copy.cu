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
  check_cuda(cudaMemcpyAsync(destination, source, num_bytes, cudaMemcpyDefault, stream));
}

}  // namespace bequest::cuda
