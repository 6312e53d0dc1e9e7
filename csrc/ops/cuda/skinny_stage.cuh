// Weights on their way into a product of a few rows: stages of 8 rows of W by 1024 of k, in shared memory as
// the copy engine places them with one request. A stage is lines of 64 of k (128 bytes), each with its 8
// rows; of row r the 16-byte piece p lies at piece p ^ r.
#pragma once

#include <cuda.h>

#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "device/tensor_map.cuh"

namespace bequest::cuda {

inline constexpr int kStageRows = 8;  // of W; of a gated product half of them are the gate's, half are up's
inline constexpr int kLine = 64;      // of k
inline constexpr int kLineBytes = kLine * 2;
inline constexpr int kStageLines = 16;
inline constexpr int kStageDepth = kStageLines * kLine;
inline constexpr int kStageBytes = kStageRows * kStageDepth * 2;

namespace detail {

inline CUtensorMap stage_map(const void* weight, cuuint32_t rank, int64_t num_matrices, int64_t out_features,
                             int64_t in_features, bool gated, int lines = kStageLines) {
  const auto k = static_cast<cuuint64_t>(in_features), halves = cuuint64_t{gated ? 2u : 1u};
  const cuuint64_t rows = static_cast<cuuint64_t>(out_features) / halves;
  const cuuint64_t sizes[] = {kLine, rows, halves, k / kLine, static_cast<cuuint64_t>(num_matrices)};
  const cuuint64_t strides[] = {k * 2, rows * k * 2, kLineBytes, halves * rows * k * 2};
  const cuuint32_t box[] = {kLine, static_cast<cuuint32_t>(kStageRows / halves),
                            static_cast<cuuint32_t>(halves), static_cast<cuuint32_t>(lines), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(weight), sizes,
                           strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           kLineFetch, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of a weight");
  return map;
}

}  // namespace detail

// W [N, K] as stages. What lies beyond its end arrives as zeros. REQUIRES: K is a multiple of kLine.
inline CUtensorMap weight_map(const void* weight, int64_t out_features, int64_t in_features, bool gated) {
  return detail::stage_map(weight, 4, 1, out_features, in_features, gated);
}

// The same of the matrices [E, N, K] of E experts.
inline CUtensorMap expert_weight_map(const void* weight, int64_t num_experts, int64_t out_features,
                                     int64_t in_features, bool gated) {
  return detail::stage_map(weight, 5, num_experts, out_features, in_features, gated);
}

// The same as quarters of stages: 256 of k of each row. REQUIRES: K is a multiple of 256.
inline constexpr int kQuarterLines = kStageLines / 4;
inline CUtensorMap expert_quarter_map(const void* weight, int64_t num_experts, int64_t out_features,
                                      int64_t in_features) {
  return detail::stage_map(weight, 5, num_experts, out_features, in_features, false, kQuarterLines);
}

// What the groups of codes of 4 bits are scaled by: a word for each row and 128 of k, rows filled up to whole
// stages of 4096. A stage has 32 words of each of its rows; the 16-byte piece p of row r lies at piece p ^ r.
inline constexpr int kStageGroups = 32;
inline constexpr int kGroupBytes = kStageRows * kStageGroups * 4;

// Of groups of 32 there are several such lines for a stage, of 1024 values each. lines: of a row, and of a
// stage; those beyond the end arrive as zeros
inline CUtensorMap group_map(const void* groups, int64_t out_features, int64_t lines, int stage_lines,
                             bool gated) {
  const cuuint64_t halves = gated ? 2 : 1, rows = static_cast<cuuint64_t>(out_features) / halves;
  const cuuint64_t pitch = static_cast<cuuint64_t>(lines) * kStageGroups * 4;
  const cuuint64_t sizes[] = {kStageGroups, rows, halves, static_cast<cuuint64_t>(lines)};
  const cuuint64_t strides[] = {pitch, rows * pitch, kStageGroups * 4};
  const cuuint32_t box[] = {kStageGroups, static_cast<cuuint32_t>(kStageRows / halves),
                            static_cast<cuuint32_t>(halves), static_cast<cuuint32_t>(stage_lines)};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, const_cast<void*>(groups), sizes, strides,
                           box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, kLineFetch,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of a weight's groups");
  return map;
}

// Asks for the stage that begins with row `row` (of each half, of a gated product) and line `line`; its
// bytes complete on `arrived`. By one thread.
__device__ __forceinline__ void copy_stage(const CUtensorMap& map, uint32_t to, PhaseBarrier& arrived,
                                           int row, int line, uint64_t policy) {
  arrived.arrive_expecting(kStageBytes);
  copy_box(map, to, arrived, {0, row, 0, line}, policy);
}
// The same of an expert's matrix.
__device__ __forceinline__ void copy_expert_stage(const CUtensorMap& map, uint32_t to, PhaseBarrier& arrived,
                                                  int2 row_and_line, int expert, uint64_t policy) {
  arrived.arrive_expecting(kStageBytes);
  copy_box(map, to, arrived, {0, row_and_line.x, 0, row_and_line.y}, expert, policy);
}

// The same with what its groups are scaled by, behind its codes, in so many lines.
template <int kLines>
__device__ __forceinline__ void copy_grouped_stage(const CUtensorMap& map, const CUtensorMap& groups,
                                                   uint32_t to, PhaseBarrier& arrived, int row, int chunk,
                                                   uint64_t policy) {
  arrived.arrive_expecting(kStageBytes + kLines * kGroupBytes);
  copy_box(map, to, arrived, {0, row, 0, chunk * kStageLines}, policy);
  copy_box(groups, to + kStageBytes, arrived, {0, row, 0, chunk * kLines}, policy);
}

// --- a lane's part of a stage, where kStageWarps warps divide each 256 of k
// ---------------------------------------------------------------------------------------------------

inline constexpr int kStageWarps = 8;
inline constexpr int kStepBytes = 256 * kStageRows * 2;  // from 256 of k to the next

// The row that a lane reads. Lanes are served eight at a time, two rows of a line; rows four apart lie in
// different banks.
__device__ __forceinline__ int row_of_lane(int lane) { return lane / 8 | (lane / 4 % 2) << 2; }

// A lane's place in a stage: 16 bytes along k of its row; further steps follow at kStepBytes.
__device__ __forceinline__ uint32_t lane_in_stage(int warp, int lane) {
  const int row = row_of_lane(lane), piece = warp % 2 * 4 + lane % 4;
  return (warp / 2 * kStageRows + row) * kLineBytes + (piece ^ row) * 16;
}

// Where the words of a lane's groups lie behind the codes of a stage: that of step s at this place ^ (s *
// 32). REQUIRES: stages are aligned to 1024 bytes
__device__ __forceinline__ uint32_t lane_in_groups(int warp, int lane) {
  const int row = row_of_lane(lane);
  return row * (kStageGroups * 4) + (warp / 4 ^ row) * 16 + warp % 4 * 4;
}

// The same of groups of 32: the four words of step s lie at this place + s * kGroupBytes where codes have 4
// bits, its two words at this place ^ (s % 2 * 64), + s / 2 * kGroupBytes, where they have 8.
__device__ __forceinline__ uint32_t lane_in_fine_groups(int bits, int warp, int lane) {
  const int row = row_of_lane(lane), piece = bits == 4 ? warp : warp / 2;
  return row * (kStageGroups * 4) + (piece ^ row) * 16 + (bits == 4 ? 0 : warp % 2 * 8);
}

}  // namespace bequest::cuda
