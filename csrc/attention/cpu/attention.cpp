#include "attention/cpu/attention.h"

#include "attention/cpu/attend.h"
#include "core/check.h"
#include "core/isa.h"
#include "core/threads.h"

namespace bequest {
namespace {

using AttendFn = void (*)(const PagedAttentionParams& p, const AttendJob& job, int split_begin, int split_end,
                          float* scratch, float* partials);

AttendFn attend_for([[maybe_unused]] const AttentionPlan& plan) {
#if defined(__x86_64__)
  if (plan.has_units()) return amx::attend;
  return current_isa() == Isa::kAvx2 ? avx2::attend : avx512::attend;
#else
  return neon::attend;
#endif
}

void merge_splits(const PagedAttentionParams& p, const AttendJob& job, const SplitStates& shared,
                  const SplitStates& own, float* scratch) {
  BEQUEST_DISPATCH_ISA(merge_splits(p, job, shared, own, scratch));
}

void check_params(const PagedAttentionParams& p, const AttentionPlan& plan) {
  const AttentionShape& shape = plan.shape();
  check(p.layer >= 0 && p.layer < p.layout.num_layers, "paged_attention: layer out of range");
  check(p.layout.num_blocks == shape.num_blocks && p.layout.block_size == shape.block_size &&
            p.layout.num_kv_heads == shape.num_kv_heads && p.layout.head_dim == shape.head_dim,
        "paged_attention: the plan was made for a cache of another shape");
  check(p.soft_cap >= 0, "paged_attention: negative soft cap");
  check(p.scale > 0 || !shape.bfloat16, "paged_attention: products in bfloat16 need a scale above 0");
  check(p.bias == nullptr || (p.soft_cap == 0 && p.bias_reach >= 0 && p.bias_reach <= INT32_MAX / 4),
        "paged_attention: a bias has a reach, and no soft cap beside it");
  check(p.bias == nullptr || !shape.causal || shape.window > 0,
        "paged_attention: a bias needs a window where the mask is causal");
  check(plan.num_workers() >= num_threads(), "paged_attention: the plan was made for fewer threads");
}

}  // namespace

void paged_attention(const PagedAttentionParams& p, const AttentionPlan& plan) {
  check_params(p, plan);
  const AttentionShape& shape = plan.shape();
  const int64_t heads = shape.num_kv_heads;
  const auto job_of = [&](const QueryTile& tile, int64_t head) {
    return AttendJob{&shape, &tile, plan.blocks(tile), static_cast<int>(head), plan.padded_dim()};
  };
  const AttendFn attend = attend_for(plan);
  const auto num_items = static_cast<int64_t>(plan.items().size());
  const int64_t num_long = plan.num_long_items();
  for_each_item(num_items * heads, [&](int64_t i, int worker) {
    // All tiles of a head first, that read its keys from L2 then; among single queries all heads of one,
    // whose keys lie side by side.
    const bool is_long = i < num_long * heads;
    const WorkItem& item = plan.items()[is_long ? i % num_long : i / heads];
    const QueryTile& tile = plan.tiles()[item.tile];
    const AttendJob job = job_of(tile, is_long ? i / num_long : i % heads);
    float* partials = tile.partial < 0 ? nullptr : plan.partial_state(tile, job.head, item.split_begin);
    attend(p, job, item.split_begin, item.split_end, plan.scratch(worker), partials);
  });
  const auto num_merged = static_cast<int64_t>(plan.merged_tiles().size());
  for_each_item(num_merged * heads, [&](int64_t i, int worker) {
    const QueryTile& tile = plan.tiles()[plan.merged_tiles()[i / heads]];
    const AttendJob job = job_of(tile, i % heads);
    merge_splits(p, job, plan.shared_states(tile, job.head), plan.own_states(tile, job.head),
                 plan.scratch(worker));
  });
}

}  // namespace bequest
