#include "ops/cpu/sampling_draw.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(int32_t draw(const float* x, int64_t n, float inverse_temperature, Cutoff cutoff,
                                     int32_t best_id, const DrawKey& key))
BEQUEST_DECLARE_PER_ISA(int32_t draw_from(const Candidate* candidates, int64_t n, float inverse_temperature,
                                          const DrawKey& key))

int32_t draw(const float* x, int64_t n, float inverse_temperature, Cutoff cutoff, int32_t best_id,
             const DrawKey& key) {
  BEQUEST_DISPATCH_ISA(draw(x, n, inverse_temperature, cutoff, best_id, key));
}
int32_t draw_from(const Candidate* candidates, int64_t n, float inverse_temperature, const DrawKey& key) {
  BEQUEST_DISPATCH_ISA(draw_from(candidates, n, inverse_temperature, key));
}

}  // namespace bequest
