// The sizes of fine_experts.cu, its shared memory, and its maps.
#pragma once

#include "device/barriers.cuh"
#include "device/fine_values.cuh"
#include "device/tensor_map.cuh"
#include "device/warpgroup.cuh"
#include "ops/cuda/expert_rows.cuh"
#include "ops/cuda/fine_codes.h"

namespace bequest::cuda {

// `Tokens` rows of x by 64 rows of W for each of three warpgroups. A stage has 128 of k.
template <class CodecType, int Tokens>
struct FineTileShape {
  using Codec = CodecType;
  static constexpr int kTokens = Tokens, kPartTokens = Tokens;
  static constexpr bool kIsCut = Tokens == 64;
  static constexpr int kGroups = 3, kRows = kGroups * 64;  // of W
  static constexpr int kPanels = 2, kDepth = kPanels * kPanelColumns;
  static constexpr int kTokenPanelBytes = Tokens * kPanelRowBytes;
  // What four lanes read of a row at once lies together, and two rows of it in all banks.
  static constexpr int kReadBytes = 64, kReads = Codec::kBits / 4;
  static constexpr int kCodePanelBytes = kRows * kReadBytes;
  static constexpr int kRowWordBytes = 16;
  static constexpr int kWeightBytes = kReads * kCodePanelBytes + kRows * kRowWordBytes;
  static constexpr int kStages = Codec::kBits == 4 ? 6 : 4;
  static constexpr int kMultipliers = kGroups * 128;  // threads
  static constexpr int kRowWarps = 3;
  static constexpr int kThreads = kMultipliers + kWarp + kRowWarps * kWarp;
  static constexpr int kResultPitch = 64 + 8;  // tokens that are stored at once lie in different banks
};

template <class S>
struct FineBuffers {
  alignas(1024) uint8_t tokens[S::kStages][S::kPanels * S::kTokenPanelBytes];
  alignas(128) uint8_t codes[S::kStages][S::kReads * S::kCodePanelBytes];
  alignas(128) uint8_t words[S::kStages][S::kRows * S::kRowWordBytes];
  alignas(16) BFloat16 results[S::kGroups][S::kTokens][S::kResultPitch];
  PhaseBarrier full[S::kStages];   // codes, words and rows are there
  PhaseBarrier empty[S::kStages];  // they have been multiplied

  __device__ void init() {
    for (int i = 0; i < S::kStages; ++i) {
      full[i].init(1 + S::kRowWarps * kWarp);
      empty[i].init(S::kMultipliers / kWarp);
    }
    publish_barriers();
  }
};

// Codes and words of all experts as blocks of tiles: {along k, 8 rows, gate and up, eights of rows}, as in
// expert_tiles.cu. A block of outputs may reach into the next expert, whose products nobody stores, and
// behind the last one there are zeros.
struct FineMaps {
  CUtensorMap codes, words;
};

// width: of a row, and of the box; of elements of `bytes` each
inline CUtensorMap fine_map(const void* data, CUtensorMapDataType type, int64_t bytes, int64_t width,
                            int box_width, const FineMatrices& m, bool gated, int tile_rows) {
  const cuuint64_t halves = gated ? 2 : 1, stride = static_cast<cuuint64_t>(width * bytes);
  const cuuint64_t half_rows = static_cast<cuuint64_t>(m.out_features) / halves;
  const cuuint64_t rows = static_cast<cuuint64_t>(m.num_matrices * m.out_features) - (halves - 1) * half_rows;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), kEight, halves, rows / kEight};
  const cuuint64_t strides[] = {stride, half_rows * stride, kEight * stride};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_width), kEight, static_cast<cuuint32_t>(halves),
                            static_cast<cuuint32_t>(tile_rows) / kEight / static_cast<cuuint32_t>(halves)};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, type, 4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of experts in codes");
  return map;
}

// Words of 128 of k.
template <class Codec>
inline constexpr int kFineUnitWords = Codec::kWords * Codec::kBits / 4;

template <class S>
FineMaps fine_maps(const FineMatrices& m, bool gated) {
  const int64_t depth = round_up(m.in_features, kFineUnit), code_bytes = depth * S::Codec::kBits / 8;
  const int64_t words = depth / S::kDepth * kFineUnitWords<typename S::Codec>;
  return {
      fine_map(m.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, code_bytes, S::kReadBytes, m, gated, S::kRows),
      fine_map(m.words, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, words, S::kRowWordBytes / 4, m, gated, S::kRows)};
}

}  // namespace bequest::cuda
