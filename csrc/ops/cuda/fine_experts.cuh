// The sizes of fine_experts.cu, its shared memory, and its maps.
#pragma once

#include "device/barriers.cuh"
#include "device/fine_values.cuh"
#include "device/tensor_map.cuh"
#include "device/warpgroup.cuh"
#include "ops/cuda/expert_rows.cuh"
#include "ops/cuda/fine_codes.h"

namespace bequest::cuda {

// `Tokens` rows of x by 64 rows of W for each of three warpgroups. A stage has 128 bytes of each row of W,
// and words come for one stage or several: the copy engine takes as long for short pieces of rows as for long
// ones.
template <class CodecType, int Tokens>
struct FineTileShape {
  using Codec = CodecType;
  static constexpr int kTokens = Tokens, kPartTokens = Tokens;
  static constexpr bool kIsCut = Tokens == 64;
  static constexpr int kGroups = 3, kRows = kGroups * 64;  // of W
  static constexpr int kDepth = kPanelRowBytes * 8 / Codec::kBits, kPanels = kDepth / kPanelColumns;
  static constexpr int kTokenPanelBytes = Tokens * kPanelRowBytes;
  static constexpr int kReads = 2;  // of 64 bytes of a row, which four lanes read at once
  static constexpr int kRowWords = 8, kUnitWords = kReads * Codec::kWords;  // of a box, and of a stage
  static constexpr int kSharing = kRowWords / kUnitWords;  // stages that share a box of words
  static constexpr int kCodeBytes = kRows * kPanelRowBytes, kWordBytes = kRows * kRowWords * 4;
  static constexpr int kStages = Codec::kBits == 8 || Tokens == 32 ? 4 : 3;
  // A box is written again so many boxes later: whoever read it has given its stages back by then.
  static constexpr int kBoxes = 4;
  static_assert(kBoxes >= kStages && kRowWords % kUnitWords == 0);
  static constexpr int kMultipliers = kGroups * 128;  // threads
  static constexpr int kRowWarps = 3;
  static constexpr int kThreads = kMultipliers + kWarp + kRowWarps * kWarp;
  static constexpr int kResultPitch = kRows + 8;  // tokens that are stored at once lie in different banks
};

template <class S>
struct FineBuffers {
  alignas(1024) uint8_t tokens[S::kStages][S::kPanels * S::kTokenPanelBytes];
  alignas(1024) uint8_t codes[S::kStages][S::kCodeBytes];
  alignas(128) uint8_t words[S::kBoxes][S::kWordBytes];
  alignas(16) BFloat16 results[S::kTokens][S::kResultPitch];
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

// width: of a row, and of the box; of elements of `bytes` each. Bytes lie in panels, words as they are.
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
      bytes == 1 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, kLineFetch,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "the driver refused the tensor map of experts in codes");
  return map;
}

template <class S>
FineMaps fine_maps(const FineMatrices& m, bool gated) {
  const int64_t depth = round_up(m.in_features, kFineUnit), code_bytes = depth * S::Codec::kBits / 8;
  const int64_t words = depth / S::kDepth * S::kUnitWords;
  return {fine_map(m.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, code_bytes, kPanelRowBytes, m, gated, S::kRows),
          fine_map(m.words, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, words, S::kRowWords, m, gated, S::kRows)};
}

}  // namespace bequest::cuda
