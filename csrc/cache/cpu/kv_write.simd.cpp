#include "cache/cpu/kv_write.h"
#include "core/simd.h"

namespace bequest::BEQUEST_ISA {
namespace {

template <class T>
void store_row(T* to, const float* from, int64_t n, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * factor);
  if (i == n) return;
  float tail[kLanes] = {};
  T rounded[kLanes];
  for (int64_t j = i; j < n; ++j) tail[j - i] = from[j];
  store(rounded, load(tail) * factor);
  for (int64_t j = i; j < n; ++j) to[j] = rounded[j - i];
}
void store_row(float* to, const float* from, int64_t n, float) { std::memcpy(to, from, n * sizeof(float)); }

template <class T>
void write_tokens(const KvWriteParams& p, int64_t begin, int64_t end) {
  const KvLayout& layout = p.layout;
  const int64_t dim = layout.head_dim;
  const bool scales = p.kv_dtype == DType::kF8E4M3;
  const float key_factor = scales ? p.key_factor : 1.0f, value_factor = scales ? p.value_factor : 1.0f;
  for (int64_t t = begin; t < end; ++t) {
    if (p.slots[t] < 0) continue;
    for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
      T* key = static_cast<T*>(p.kv_cache) + layout.key_of_slot(p.slots[t], p.layer, head);
      store_row(key, p.k + t * p.k_stride + head * dim, dim, key_factor);
      store_row(key + layout.values_after_keys(), p.v + t * p.v_stride + head * dim, dim, value_factor);
    }
  }
}

}  // namespace

void write_kv_tokens(const KvWriteParams& p, int64_t begin, int64_t end) {
  if (p.kv_dtype == DType::kF32) return write_tokens<float>(p, begin, end);
  if (p.kv_dtype == DType::kF8E4M3) return write_tokens<Float8>(p, begin, end);
  if (p.kv_dtype == kF16) return write_tokens<Float16>(p, begin, end);
  write_tokens<BFloat16>(p, begin, end);
}

}  // namespace bequest::BEQUEST_ISA
