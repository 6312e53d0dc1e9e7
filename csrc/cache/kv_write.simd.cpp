#include "cache/kv_write.h"
#include "core/simd.h"

namespace bequest::BEQUEST_ISA {
namespace {

void store_row(BFloat16* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i == n) return;
  float tail[kLanes] = {};
  BFloat16 rounded[kLanes];
  for (int64_t j = i; j < n; ++j) tail[j - i] = from[j];
  store(rounded, load(tail));
  for (int64_t j = i; j < n; ++j) to[j] = rounded[j - i];
}
void store_row(float* to, const float* from, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

template <class T>
void write_tokens(const KvWriteParams& p, int64_t begin, int64_t end) {
  const KvLayout& layout = p.layout;
  const int64_t dim = layout.head_dim;
  for (int64_t t = begin; t < end; ++t) {
    if (p.slots[t] < 0) continue;
    for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
      T* key = static_cast<T*>(p.kv_cache) + layout.key_of_slot(p.slots[t], p.layer, head);
      store_row(key, p.k + t * p.k_stride + head * dim, dim);
      store_row(key + layout.values_after_keys(), p.v + t * p.v_stride + head * dim, dim);
    }
  }
}

}  // namespace

void write_kv_tokens(const KvWriteParams& p, int64_t begin, int64_t end) {
  if (p.kv_dtype == DType::kF32) return write_tokens<float>(p, begin, end);
  write_tokens<BFloat16>(p, begin, end);
}

}  // namespace bequest::BEQUEST_ISA
