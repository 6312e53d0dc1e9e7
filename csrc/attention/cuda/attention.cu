#include <algorithm>
#include <bit>
#include <cstddef>
#include <type_traits>

#include "attention/cuda/attention.h"
#include "attention/cuda/device_args.cuh"
#include "attention/cuda/single_token.h"
#include "attention/cuda/tensor_map.cuh"
#include "device/current_device.cuh"
#include "device/launch.cuh"

namespace bequest::cuda {
namespace {

AttentionArgs make_args(const CudaAttentionParams& p) {
  const size_t key_offset = p.layout.keys(p.layer, 0) * size_of(p.kv_dtype);
  AttentionArgs a{};
  a.q = p.q;
  a.out = p.out;
  a.keys = static_cast<const char*>(p.kv_cache) + key_offset;
  a.block_tables = p.block_tables;
  a.work_list = p.work_list;
  a.items = reinterpret_cast<const int4*>(p.work_list + p.lists.decode_items);
  a.num_items = p.work_list + offsetof(WorkListHeader, num_decode_items) / sizeof(int32_t);
  a.tickets = reinterpret_cast<TicketCounter*>(p.tickets);
  static_assert(kDrawnTickets * sizeof(int32_t) == sizeof(TicketCounter));
  a.counters = p.tickets + kDrawnTickets;
  a.merges = reinterpret_cast<const int4*>(p.work_list + p.lists.merges);
  a.num_merge_entries = p.lists.max_decode_merges + p.lists.max_prefill_merges;
  a.state_values = p.state_values;
  a.state_scales = reinterpret_cast<float2*>(p.state_scales);
  a.mail = p.mail;
  a.mail_rows = p.lists.mail_rows;
  a.mail_scales = p.mail + p.layout.num_kv_heads * a.mail_rows * p.layout.head_dim / 2;
  a.q_stride = p.q_stride;
  a.block_stride = p.layout.block_stride();
  a.values_after_keys = p.layout.values_after_keys();
  a.max_blocks = p.max_blocks;
  a.head_stride = static_cast<int32_t>(p.layout.block_size * p.layout.head_dim);
  a.block_size = static_cast<int32_t>(p.layout.block_size);
  a.log2_block_size = std::bit_width(static_cast<uint32_t>(a.block_size)) - 1;
  a.head_dim = static_cast<int32_t>(p.layout.head_dim);
  a.num_q_heads = p.num_q_heads;
  a.num_kv_heads = static_cast<int32_t>(p.layout.num_kv_heads);
  a.group = a.num_q_heads / a.num_kv_heads;
  a.window = p.window > 0 ? p.window : INT_MAX / 2;
  a.score_factor = p.key_scale * (p.soft_cap > 0.0f ? p.scale / p.soft_cap : p.scale * kLog2E);
  a.cap_factor = p.soft_cap * kLog2E;
  a.value_scale = p.value_scale;
  a.bias = p.bias;
  a.bias_reach = p.bias_reach;
  a.sinks = p.sinks;
  a.far_position = p.causal ? 0 : kFarPosition;
  return a;
}

template <class F>
void dispatch_head_dim(int head_dim, F&& f) {
  switch (head_dim) {
    case 64:
      return f.template operator()<64>();
    case 128:
      return f.template operator()<128>();
    case 256:
      return f.template operator()<256>();
  }
  fail("bf16 attention: head_dim must be 64, 128, 256 or 512");
}

// Whether prefill without a bias goes to warpgroup products, on the current device.
bool takes_wgmma(int head_dim, DType kv_dtype) {
  return head_dim <= 128 && is_hopper() && (kv_dtype == DType::kBF16 || kv_dtype == DType::kF8E4M3);
}

template <int D, class Cache>
void launch_prefill_any(const CudaAttentionParams& p, AttentionArgs a, Scores scores, Stream stream) {
  a.items = reinterpret_cast<const int4*>(p.work_list + p.lists.prefill_items);
  a.num_items = p.work_list + offsetof(WorkListHeader, num_prefill_items) / sizeof(int32_t);
  if constexpr (D <= 128) {
    if (scores != Scores::kBias && takes_wgmma(D, p.kv_dtype)) {
      const int blocks = p.lists.blocks / attention_blocks_per_sm(D);
      const PrefillMaps maps = prefill_maps(p, a.keys);
      if constexpr (std::is_same_v<Cache, Bf16Cache>)
        return launch_prefill_wgmma<D>(a, maps, blocks, scores, stream);
      else
        return launch_prefill_wgmma_fp8<D>(a, maps, blocks, scores, stream);
    }
  }
  launch_prefill<D, Cache>(a, p.lists.blocks, scores, stream);
}

void check_block_size(int block_size) {
  check(block_size >= 8 && std::has_single_bit(static_cast<uint32_t>(block_size)),
        "bf16 attention: block_size must be a power of two, at least 8");
}

// Of heads of 512.
void launch_broad(const CudaAttentionParams& p, const AttentionLaunches& launches, AttentionArgs a,
                  Stream stream) {
  check(p.kv_dtype == DType::kBF16 && p.soft_cap == 0.0f && p.bias == nullptr,
        "heads of 512 are for a cache in bf16, without a soft cap or a bias");
  if (launches.decode) launch_broad_decode(a, p.lists.workers, stream);
  if (!launches.prefill) return;
  a.items = reinterpret_cast<const int4*>(p.work_list + p.lists.prefill_items);
  a.num_items = p.work_list + offsetof(WorkListHeader, num_prefill_items) / sizeof(int32_t);
  launch_broad_prefill(a, p.lists.blocks, stream);
}

template <class Cache>
void launch_bf16(const CudaAttentionParams& p, const AttentionLaunches& launches, AttentionArgs a,
                 Stream stream) {
  check_block_size(a.block_size);
  check(is_aligned(p.q, 16) && p.q_stride % 8 == 0, "rows of q must be 16-byte aligned");
  const Scores scores = p.soft_cap > 0.0f ? Scores::kSoftCap : p.bias ? Scores::kBias : Scores::kPlain;
  const auto finish = [&] {
    if (p.rounded.codes != nullptr) return launch_merge_rounded(a, p.rounded, p.num_tokens, stream);
    const int merge_blocks = std::min(launches.max_merges, p.lists.workers);  // all at once on the device
    if (merge_blocks > 0) launch_merge(a, merge_blocks, stream);
  };
  if (a.head_dim == kBroadHead) {
    launch_broad(p, launches, a, stream);
    return finish();
  }
  dispatch_head_dim(a.head_dim, [&]<int D>() {
    if (launches.prefill) launch_prefill_any<D, Cache>(p, a, scores, stream);
    a.follows_prefill = launches.prefill;
    a.reads_early = p.causal && !launches.prefill && is_captured(stream);
    if (launches.decode) launch_decode<D, Cache>(a, p.lists.workers, scores, stream);
  });
  finish();
}

void check_params(const CudaAttentionParams& p) {
  check(p.layer >= 0 && p.layer < p.layout.num_layers, "layer outside the cache");
  check(p.scale > 0.0f && p.soft_cap >= 0.0f, "scale must be positive, soft_cap not negative");
  check(p.bias == nullptr || (p.soft_cap == 0.0f && p.bias_reach >= 0 && p.bias_reach < kFarPosition),
        "a bias has a reach, and no soft cap beside it");
  check(p.bias == nullptr || !p.causal || p.window > 0, "a bias needs a window where the mask is causal");
  check(p.kv_dtype == p.dtype || p.kv_dtype == DType::kF8E4M3, "the cache has the dtype of q, or is fp8");
  check(p.key_scale > 0.0f && p.value_scale > 0.0f, "scales of keys and values must be positive");
}

}  // namespace
}  // namespace bequest::cuda

namespace bequest {

using namespace cuda;

int prefill_blocks_per_sm(int head_dim, DType kv_dtype) {
  return takes_wgmma(head_dim, kv_dtype) ? 1 : attention_blocks_per_sm(head_dim);
}

bool has_wide_tiles() { return is_hopper(); }

void cuda_paged_attention(const CudaAttentionParams& p, const AttentionLaunches& launches, Stream stream) {
  check_params(p);
  const AttentionArgs a = make_args(p);
  if (p.dtype == DType::kBF16) {
    if (p.kv_dtype == DType::kBF16) return launch_bf16<Bf16Cache>(p, launches, a, stream);
    return launch_bf16<Fp8Cache>(p, launches, a, stream);
  }
  check(p.dtype == DType::kF32 && p.rounded.codes == nullptr, "attention is for bf16 and f32");
  if (launches.decode) launch_f32(a, p.kv_dtype, p.lists.blocks, stream);
}

bool can_attend_token(const WorkShape& shape) {
  return shape.dtype == DType::kBF16 && shape.head_dim < kBroadHead && shape.causal &&
         shape.group() <= kDecodeRows && 2 * shape.num_kv_heads <= shape.num_multiprocessors && is_hopper();
}

void attend_token(const CudaAttentionParams& p, const QkvParams& heads, Stream stream) {
  check_params(p);
  check(p.dtype == DType::kBF16 && p.causal && p.soft_cap == 0.0f && p.bias == nullptr,
        "a single token is attended in bf16, causally, without a soft cap or a bias");
  const AttentionArgs a = make_args(p);
  check_block_size(a.block_size);
  check(a.group <= kDecodeRows && heads.num_tokens == 1 && heads.head_dim == a.head_dim &&
            heads.rotary_dim % 2 == 0 && heads.rotary_dim <= heads.head_dim,
        "a single token: heads");
  for (const void* pointer : {static_cast<const void*>(heads.q), static_cast<const void*>(heads.k),
                              static_cast<const void*>(heads.v), heads.q_weight, heads.k_weight})
    check(is_aligned(pointer, 16), "a single token: heads must be 16-byte aligned");
  dispatch_head_dim(a.head_dim, [&]<int D>() {
    const int multiprocessors = p.lists.blocks / attention_blocks_per_sm(D);
    if (p.kv_dtype == DType::kBF16)
      return launch_single_token<D, Bf16Cache>(a, heads, multiprocessors, stream);
    launch_single_token<D, Fp8Cache>(a, heads, multiprocessors, stream);
  });
}

}  // namespace bequest
