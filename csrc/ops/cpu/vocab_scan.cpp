#include "ops/cpu/vocab_scan.h"

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(RowMax scan_max(const float* x, int64_t n))
BEQUEST_DECLARE_PER_ISA(int32_t find_first(const float* x, int64_t n, float value))
BEQUEST_DECLARE_PER_ISA(double sum_exp(const float* x, int64_t n, float max, float inverse_temperature,
                                       float floor))
BEQUEST_DECLARE_PER_ISA(int64_t count_greater(const float* x, int64_t n, float value))
BEQUEST_DECLARE_PER_ISA(int64_t set_maxima(const float* x, int64_t n, int64_t set_size, float* maxima))
BEQUEST_DECLARE_PER_ISA(int64_t collect(const float* x, int64_t n, float lower, float upper, Candidate* out))
BEQUEST_DECLARE_PER_ISA(void measure_mass(const float* x, int64_t n, float max, float inverse_temperature,
                                          MassLevels& levels))

RowMax scan_max(const float* x, int64_t n) { BEQUEST_DISPATCH_ISA(scan_max(x, n)); }
int32_t find_first(const float* x, int64_t n, float value) { BEQUEST_DISPATCH_ISA(find_first(x, n, value)); }
double sum_exp(const float* x, int64_t n, float max, float inverse_temperature, float floor) {
  BEQUEST_DISPATCH_ISA(sum_exp(x, n, max, inverse_temperature, floor));
}
int64_t count_greater(const float* x, int64_t n, float value) {
  BEQUEST_DISPATCH_ISA(count_greater(x, n, value));
}
int64_t set_maxima(const float* x, int64_t n, int64_t set_size, float* maxima) {
  BEQUEST_DISPATCH_ISA(set_maxima(x, n, set_size, maxima));
}
int64_t collect(const float* x, int64_t n, float lower, float upper, Candidate* out) {
  BEQUEST_DISPATCH_ISA(collect(x, n, lower, upper, out));
}
void measure_mass(const float* x, int64_t n, float max, float inverse_temperature, MassLevels& levels) {
  BEQUEST_DISPATCH_ISA(measure_mass(x, n, max, inverse_temperature, levels));
}

}  // namespace bequest
