// A thread has 16 bytes of codes, a lane's part of a block, and writes eight neighbours of each of its
// groups.
#include "device/fine_values.cuh"
#include "device/launch.cuh"
#include "ops/cuda/fine_rows.h"

namespace bequest::cuda {
namespace {

constexpr unsigned kThreads = 256;

__device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale) {
  const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
  return pack(both.x * scale, both.y * scale);
}

template <class Codec>
__global__ void fine_rows_kernel(const FineMatrices m, uint4* out, int64_t row_reads) {
  constexpr int kBlock = Codec::kGroups * 32;  // values of four threads
  let_next_start();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool exists = i < m.num_matrices * m.out_features * row_reads;
  const int64_t row = i / row_reads, read = i % row_reads;
  const int lane = static_cast<int>(read % 4);
  uint32_t codes[4] = {}, words[Codec::kWords] = {};
  float scale = 0;
  if (exists) {
    const uint4 all = __ldcs(static_cast<const uint4*>(m.codes) + i);
    codes[0] = all.x, codes[1] = all.y, codes[2] = all.z, codes[3] = all.w;
    const uint32_t* from = m.words + (row * (row_reads / 4) + read / 4) * Codec::kWords;
#pragma unroll
    for (int w = 0; w < Codec::kWords; ++w) words[w] = __ldg(from + w);
    scale = __ldg(m.scales + row);
  }
  wait_for_previous();  // who reads what lies where this goes
  if (!exists) return;
#pragma unroll
  for (int group = 0; group < Codec::kGroups; ++group) {
    const int64_t at = read / 4 * kBlock + group * 32 + lane * 8;
    if (at >= m.in_features) continue;
    uint32_t pairs[4];
    Codec::widen(codes, words, group, lane < 2 ? kFirstTwice : kSecondTwice, pairs);
    out[(row * m.in_features + at) / 8] = {scaled(pairs[0], scale), scaled(pairs[1], scale),
                                           scaled(pairs[2], scale), scaled(pairs[3], scale)};
  }
}

template <class Codec>
void launch_rows(const FineMatrices& m, void* out, Stream stream) {
  const int64_t row_reads = round_up(m.in_features, kFineUnit) * Codec::kBits / 8 / 16;
  const int64_t threads = m.num_matrices * m.out_features * row_reads;
  launch(fine_rows_kernel<Codec>,
         {.grid = static_cast<unsigned>(ceil_div(threads, kThreads)),
          .block = kThreads,
          .overlaps_previous = true},
         stream, m, static_cast<uint4*>(out), row_reads);
}

}  // namespace

void fine_rows(const FineMatrices& m, void* out, Stream stream) {
  check(m.in_features % 8 == 0 && is_aligned(m.codes, 16) && is_aligned(m.words, 16) && is_aligned(out, 16),
        "fine_rows: sizes or places");
  switch (m.codec) {
    case FineCodec::kOffset4:
      return launch_rows<fine::Offset4>(m, out, stream);
    case FineCodec::kFloat4:
      return launch_rows<fine::Float4>(m, out, stream);
    case FineCodec::kScaled8:
      return launch_rows<fine::Scaled8>(m, out, stream);
    case FineCodec::kOffset8:
      return launch_rows<fine::Offset8>(m, out, stream);
    case FineCodec::kFloat8:
      return launch_rows<fine::Float8>(m, out, stream);
  }
}

}  // namespace bequest::cuda
