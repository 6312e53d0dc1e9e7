// A thread has 16 bytes of one group, and writes four times as many, which is what it is bound by.
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "ops/cuda/coded_rows.h"

namespace bequest::cuda {
namespace {

constexpr int kGroup = 128;
constexpr unsigned kThreads = 256;

__device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale) {
  const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
  return pack(both.x * scale, both.y * scale);
}

struct Int4 {
  static constexpr int kWidth = 32;  // codes of a thread

  __device__ static __forceinline__ void store(const uint4& codes, uint32_t word, uint4* to) {
    const CodeGroup group(word);
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pairs[4];
      int4_to_f16(words[i], group, pairs);
      to[i] = {scaled(pairs[0], group.scale), scaled(pairs[1], group.scale), scaled(pairs[2], group.scale),
               scaled(pairs[3], group.scale)};
    }
  }
};

template <class Codec>
__global__ void coded_rows_kernel(const CodedRowsParams p) {
  let_next_start();
  constexpr int kWidth = Codec::kWidth;
  const int64_t in_row = p.width / kWidth, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool exists = i < p.num_rows * in_row;
  const int64_t row = i / in_row, at = i % in_row;
  uint4 codes{};
  uint32_t word = 0;
  if (exists) {
    codes = __ldcs(static_cast<const uint4*>(p.codes) + i);
    word = __ldg(p.groups + row * p.pitch + at / (kGroup / kWidth));
  }
  wait_for_previous();  // who reads what lies where this goes
  if (exists) Codec::store(codes, word, static_cast<uint4*>(p.out) + i * (kWidth / 8));
}

template <class Codec>
void launch_rows(const CodedRowsParams& p, Stream stream) {
  const int64_t threads = p.num_rows * (p.width / Codec::kWidth);
  launch(coded_rows_kernel<Codec>,
         {.grid = static_cast<unsigned>(ceil_div(threads, kThreads)),
          .block = kThreads,
          .overlaps_previous = true},
         stream, p);
}

}  // namespace

void coded_rows(const CodedRowsParams& p, Stream stream) {
  check(p.width % kGroup == 0 && p.pitch >= p.width / kGroup, "coded_rows: sizes");
  check(is_aligned(p.codes, 16) && is_aligned(p.out, 16), "coded_rows: rows must be aligned");
  launch_rows<Int4>(p, stream);
}

}  // namespace bequest::cuda
