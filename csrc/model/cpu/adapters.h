// Adapters as the layers of the CPU meet them: what each adds to which product, and which rows of a step have
// which.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "ops/cpu/lora.h"

namespace bequest {

inline constexpr int64_t kNoSite = -1;

// An adapter by the numbers of the products that it adds to. Whoever makes it keeps the matrices.
struct Adapter {
  std::unordered_map<int64_t, std::vector<LoraPart>> sites;
};

// The rows that something is added to at a site, and what is read there, in memory of their own.
struct AdaptedRows {
  std::vector<int64_t> rows;     // as they were numbered
  std::vector<float> x;          // [rows, K]
  std::vector<int64_t> places;   // 0, 1, …: what the groups name
  std::vector<LoraRows> groups;  // by adapter
};

// Of a step, or of those of its rows that are read.
class StepAdapters {
 public:
  struct Group {
    const Adapter* adapter;
    std::vector<int64_t> rows;  // ascending
  };

  explicit StepAdapters(std::vector<Group> groups) : groups_(std::move(groups)) {}

  // The rows that something is added to at a site, by adapter.
  std::vector<LoraRows> at(int64_t site) const;
  bool is_at(int64_t site) const;
  int64_t num_rows_at(int64_t site) const;
  // Of x [T, width].
  AdaptedRows gather(int64_t site, const float* x, int64_t width) const;

  // Of the rows [R], ascending, alone: what was row rows[i] is row i.
  StepAdapters of(const int64_t* rows, int64_t num_rows) const;

 private:
  std::vector<Group> groups_;
};

}  // namespace bequest
