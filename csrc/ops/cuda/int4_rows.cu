// A thread has 32 codes of one group: 16 bytes read, 64 written. Bound by the latter.
#include "device/launch.cuh"
#include "device/pairs.cuh"
#include "ops/cuda/int4_rows.h"

namespace bequest::cuda {
namespace {

constexpr int kWidth = 32;  // codes of a thread
constexpr int kGroup = 128;
constexpr unsigned kThreads = 256;

// Eight codes as bfloat16.
__device__ __forceinline__ uint4 widened(uint32_t eight, const CodeGroup& group) {
  uint32_t pairs[4];
  int4_to_f16(eight, group, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
    pair = pack(both.x * group.scale, both.y * group.scale);
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

__global__ void int4_rows_kernel(const Int4RowsParams p) {
  let_next_start();
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
  if (!exists) return;
  const CodeGroup group(word);
  uint4* const to = static_cast<uint4*>(p.out) + i * (kWidth / 8);
  to[0] = widened(codes.x, group);
  to[1] = widened(codes.y, group);
  to[2] = widened(codes.z, group);
  to[3] = widened(codes.w, group);
}

}  // namespace

void int4_rows(const Int4RowsParams& p, Stream stream) {
  check(p.width % kGroup == 0 && p.pitch >= p.width / kGroup, "int4_rows: sizes");
  check(is_aligned(p.codes, 16) && is_aligned(p.out, 16), "int4_rows: rows must be aligned");
  const int64_t threads = p.num_rows * (p.width / kWidth);
  launch(int4_rows_kernel,
         {.grid = static_cast<unsigned>(ceil_div(threads, kThreads)),
          .block = kThreads,
          .overlaps_previous = true},
         stream, p);
}

}  // namespace bequest::cuda
