#include "ops/cpu/lora.h"

#include <algorithm>

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void add_lora(const LoraWork& work))

namespace {

void dispatch(const LoraWork& work) { BEQUEST_DISPATCH_ISA(add_lora(work)); }

}  // namespace

void add_lora(const LoraParams& p) {
  std::vector<LoraBlock> blocks;
  int64_t num_inner = 0, max_rank = 0, max_columns = 0;
  for (const LoraRows& group : p.groups)
    for (const LoraPart& part : *group.parts) {
      check(part.rank >= 1 && part.num_columns >= 1 && part.first_column >= 0 &&
                part.first_column + part.num_columns <= p.y_stride,
            "add_lora: a part does not fit the product");
      check(part.in_features == p.in_features || p.x == nullptr, "add_lora: a part reads other rows");
      for (int64_t i = 0; p.x == nullptr && i < group.num_rows; ++i)
        check(p.ids[group.rows[i]] >= 0 && p.ids[group.rows[i]] < part.in_features,
              "add_lora: a row outside the table");
      for (int64_t first = 0; first < group.num_rows; first += kLoraRows)
        blocks.push_back({&part, group.rows + first, std::min(kLoraRows, group.num_rows - first), nullptr});
      num_inner += group.num_rows * part.rank;
      max_rank = std::max(max_rank, part.rank);
      max_columns = std::max(max_columns, part.num_columns);
    }
  if (blocks.empty()) return;
  std::vector<float> inner(static_cast<size_t>(num_inner));
  float* place = inner.data();
  for (LoraBlock& block : blocks) {
    block.inner = place;
    place += block.num_rows * block.part->rank;
  }
  dispatch({p, blocks.data(), static_cast<int64_t>(blocks.size()), max_rank, max_columns});
}

}  // namespace bequest
