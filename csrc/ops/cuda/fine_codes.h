// Weights in codes of 4 or 8 bits with scales for every 32 values of a row, or fewer.
//
// Values are float16 in registers, times a float32 for each row that brings its largest near 1. Codes lie in
// the order in which tensor cores take them: of a block of four or two groups, a lane of a quad has eight
// neighbours of each group, 16 bytes in all (engine/kernels/cuda_fine.py writes them).
#pragma once

#include <cstdint>

namespace bequest::cuda {

enum class FineCodec : int {
  kOffset4,  // code · s + o; a word of each 32 has s and o, two float16
  kFloat4,   // e2m1 · 2^(b - 15 - 14); a word of each 128 has four bytes b
  kScaled8,  // (code - 128) · s; a word of each 32 has s of its first 16 and of the others
  kOffset8,  // code · s + o, as kOffset4
  kFloat8,   // e4m3 · s, as kScaled8
};
inline constexpr int kNumFineCodecs = 5;

inline constexpr int kFineUnit = 256;  // rows of codes are filled up to a multiple of it

struct FineMatrices {
  const void* codes;      // [E, N, K' / 2 or K'] bytes, aligned to 16 bytes; K' is K filled up
  const uint32_t* words;  // [E, N, words of K'], aligned to 16 bytes
  const float* scales;    // [E, N]
  int64_t num_matrices;   // E
  int64_t out_features;   // N
  int64_t in_features;    // K, a multiple of 8
  FineCodec codec;
};

}  // namespace bequest::cuda
