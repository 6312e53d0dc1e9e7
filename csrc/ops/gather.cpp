#include "ops/gather.h"

#include <string>

#include "core/threads.h"
#include "ops/linear.h"

namespace bequest {

void gather_rows(const GatherParams& p) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (p.ids[t] < 0 || p.ids[t] >= p.out_features) [[unlikely]]
      fail("gather_rows: id " + std::to_string(p.ids[t]) + " is outside the " +
           std::to_string(p.out_features) + " rows");
  }
  dispatch(p.weight_dtype, [&]<class T>() {
    parallel_for(p.num_tokens, 4, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t panel = p.ids[t] / kPanelWidth;
        const T* column =
            static_cast<const T*>(p.weight) + panel * p.in_features * kPanelWidth + p.ids[t] % kPanelWidth;
        float* out = p.out + t * p.in_features;
        for (int64_t k = 0; k < p.in_features; ++k) out[k] = to_float(column[k * kPanelWidth]);
      }
    });
  });
}

}  // namespace bequest
