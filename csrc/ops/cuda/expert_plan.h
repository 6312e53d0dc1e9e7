// Which rows each expert multiplies, in device memory: what routing leaves for the products of experts.
//
// A pair is a token and one of its K experts; pair t * K + k. The pairs of one expert, in ascending order,
// are its run. Runs follow each other by expert, and each is cut into tiles of `tile_rows` pairs.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace bequest::cuda {

inline constexpr int64_t kMostExperts = 1024;
inline constexpr int64_t kMostChosen = 32;  // K

struct alignas(16) ExpertRun {
  int32_t expert;
  int32_t first;       // its first pair, in the order of runs
  int32_t count;       // pairs
  int32_t first_tile;  // among the tiles of all runs
};

struct ExpertSizes {
  int64_t num_tokens;   // T
  int64_t num_chosen;   // K
  int64_t num_experts;  // E

  constexpr int64_t num_pairs() const { return num_tokens * num_chosen; }
  // Twice what experts get on average and a few, because runs differ, and no more than an expert can get.
  // For the host: no constexpr, which device code would take for its own.
  int tile_rows() const {
    const int64_t most = std::min(num_tokens, 2 * num_pairs() / std::max<int64_t>(num_experts, 1) + 6);
    return static_cast<int>(std::clamp<uint64_t>(std::bit_ceil(static_cast<uint64_t>(most)), 8, 256));
  }
  int64_t most_tiles() const { return std::min(num_pairs(), num_experts) + num_pairs() / tile_rows(); }
};

struct ExpertPlan {
  int32_t* num_tiles;  // [1]
  ExpertRun* runs;     // [most_tiles]: the run that a tile is a part of
  int32_t* order;      // [T * K]: pairs, run by run, and nothing behind the last
  int32_t tile_rows;
  unsigned long long* num_read;  // the experts that have a run are added to it; null: nobody counts
};

// In memory that is aligned to 16 bytes.
inline int64_t expert_plan_bytes(const ExpertSizes& sizes) {
  return 16 + sizes.most_tiles() * static_cast<int64_t>(sizeof(ExpertRun)) + sizes.num_pairs() * 4;
}
inline ExpertPlan expert_plan_at(void* memory, const ExpertSizes& sizes) {
  auto* bytes = static_cast<uint8_t*>(memory);
  return {reinterpret_cast<int32_t*>(bytes), reinterpret_cast<ExpertRun*>(bytes + 16),
          reinterpret_cast<int32_t*>(bytes + 16 + sizes.most_tiles() * sizeof(ExpertRun)), sizes.tile_rows(),
          nullptr};
}

}  // namespace bequest::cuda
