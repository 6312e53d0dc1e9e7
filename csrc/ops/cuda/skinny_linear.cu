#include "device/launch.cuh"
#include "ops/cuda/skinny_linear.cuh"

namespace bequest::cuda {

bool skinny_linear_norms(int num_tokens, int64_t in_features) {
  return num_tokens <= kMostStreamedRows ? skinny_stream_norms(num_tokens, in_features)
                                         : num_tokens <= kMostFusedRows;
}

void skinny_linear(const SkinnyLinearParams& p, Stream stream) {
  check(p.num_tokens >= 1 && p.num_tokens <= kMostSkinnyRows, "skinny_linear: 1 to 32 rows");
  check(p.in_features >= 1 && p.in_features % kSkinnyDepthUnit == 0,
        "skinny_linear: K is no multiple of 256");
  check(is_aligned(p.x, 16) && is_aligned(p.weight, 16) && is_aligned(p.norm_weight, 16),
        "skinny_linear: x and the weights are aligned to 16 bytes");
  check(p.result != SkinnyResult::kGate || p.out_features % 2 == 0, "skinny_linear: gate without up");
  check(p.norm_weight == nullptr || skinny_linear_norms(p.num_tokens, p.in_features),
        "skinny_linear: rows too many or too long to be normed");
  check(in_range(p.tap) && !p.tap.store_output, "skinny_linear: tap");
  check(p.tap.ring_rows == nullptr || (p.norm_weight != nullptr && is_aligned(p.tap.ring, 16)),
        "skinny_linear: a tap is the norm's");
  check(p.num_tokens <= kMostFusedRows || (p.result == SkinnyResult::kStore && p.norm_weight == nullptr),
        "skinny_linear: rows too many to fuse");
  check(p.scales == nullptr || (p.num_tokens <= kMostStreamedRows && p.in_features % kSkinnyCodesUnit == 0),
        "skinny_linear: codes are for 1 to 4 rows, K a multiple of 512");
  p.num_tokens <= kMostStreamedRows ? skinny_linear_stream(p, stream) : skinny_linear_mma(p, stream);
}

}  // namespace bequest::cuda
