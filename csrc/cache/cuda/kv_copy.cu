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

// A copy engine begins microseconds behind the kernels ahead, and so do those behind it. For a few bytes
// threads are faster, over the bus, too.
constexpr size_t kMostByThreads = 128 * 1024;

__global__ void __launch_bounds__(kThreads)
    copy_bytes_kernel(const uint8_t* from, uint8_t* to, unsigned num_bytes) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x, vectors = num_bytes / sizeof(uint4);
  // The host writes it between launches, so nothing of it may come from a cache.
  if (i < vectors) reinterpret_cast<uint4*>(to)[i] = __ldcv(reinterpret_cast<const uint4*>(from) + i);
  const unsigned last = vectors * sizeof(uint4) + threadIdx.x;
  if (blockIdx.x == 0 && last < num_bytes) to[last] = __ldcv(from + last);
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
  if (num_bytes == 0 || num_bytes > kMostByThreads || !is_aligned(source, sizeof(uint4)) ||
      !is_aligned(destination, sizeof(uint4)))
    return check_cuda(cudaMemcpyAsync(destination, source, num_bytes, cudaMemcpyDefault, stream));
  const auto blocks =
      static_cast<unsigned>(ceil_div(static_cast<int64_t>(num_bytes), kThreads * sizeof(uint4)));
  launch(copy_bytes_kernel, {blocks, kThreads}, stream, static_cast<const uint8_t*>(source),
         static_cast<uint8_t*>(destination), static_cast<unsigned>(num_bytes));
}

}  // namespace bequest::cuda
