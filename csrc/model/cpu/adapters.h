// Adapters as the layers of the CPU meet them: what each adds to which product, and which rows of a step have
// which.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ops/cpu/lora.h"

namespace bequest {

inline constexpr int64_t kNoSite = -1;
// Experts of a layer have numbers that differ in so many bits.
inline constexpr int kExpertBits = 14;

// An adapter by the numbers of the products that it adds to. Whoever makes it keeps the matrices.
class Adapter {
 public:
  using Parts = std::vector<LoraPart>;

  explicit Adapter(std::unordered_map<int64_t, Parts> sites) : sites_(std::move(sites)) {
    for (const auto& [site, parts] : sites_) layers_.insert(site >> kExpertBits);
  }

  // Null: nothing is added there.
  const Parts* at(int64_t site) const {
    const auto found = sites_.find(site);
    return found == sites_.end() ? nullptr : &found->second;
  }
  // Whether something may be added to a product of one of the experts whose first has this number.
  bool is_among(int64_t first_site) const {
    return first_site != kNoSite && layers_.contains(first_site >> kExpertBits);
  }

 private:
  std::unordered_map<int64_t, Parts> sites_;
  std::unordered_set<int64_t> layers_;
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
  // The rows whose adapters may add to a product of some expert, of either of two matrices.
  std::vector<Group> among(int64_t first_up, int64_t first_down) const;
  int64_t num_rows_at(int64_t site) const;
  // Of x [T, width].
  AdaptedRows gather(int64_t site, const float* x, int64_t width) const;

  // Of the rows [R], ascending, alone: what was row rows[i] is row i.
  StepAdapters of(const int64_t* rows, int64_t num_rows) const;

 private:
  std::vector<Group> groups_;
};

}  // namespace bequest
