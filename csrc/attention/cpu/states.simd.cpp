// Softmax states of many rows: emptied, merged, finished. Functions of their own, so that there is one copy
// of the code: whether a tile's splits are merged as they come or in a second pass, they round alike.
#include "attention/cpu/attend.h"
#include "attention/cpu/softmax_state.h"
#include "core/simd.h"

namespace bequest::BEQUEST_ISA {
namespace {

// This tile's rows of the state of split i, to be read only.
StateRows rows_of(const SplitStates& set, int i, int padded_dim) {
  auto* base = const_cast<float*>(set.states) + i * set.rows * (padded_dim + 2);
  StateRows rows(base, set.rows, padded_dim);
  rows.o += set.first_row * padded_dim;
  rows.m += set.first_row;
  rows.d += set.first_row;
  return rows;
}

}  // namespace

void clear_states(const AttendJob& job, StateRows states) {
  const int64_t rows = job.num_rows();
  for (int64_t i = 0; i < rows * job.padded_dim; ++i) states.o[i] = 0.0f;
  for (int64_t row = 0; row < rows; ++row) {
    states.m[row] = -__builtin_inff();
    states.d[row] = 0.0f;
  }
}

void merge_states(const AttendJob& job, StateRows all, StateRows part) {
  const int64_t padded_dim = job.padded_dim;
  for (int row = 0; row < job.num_rows(); ++row) {
    const MergeFactors f = merge_factors(all.m[row], part.m[row]);
    all.m[row] = f.m;
    all.d[row] = all.d[row] * f.first + part.d[row] * f.second;
    float* o = all.o + row * padded_dim;
    const float* add = part.o + row * padded_dim;
    for (int64_t d = 0; d < padded_dim; d += kLanes)
      store(o + d, load(o + d) * f.first + load(add + d) * f.second);
  }
}

void write_result(const PagedAttentionParams& p, const AttendJob& job, StateRows all) {
  const int group = job.shape->group(), dim = job.shape->head_dim;
  for (int row = 0; row < job.num_rows(); ++row) {
    const int64_t token = job.tile->first_token + row / group;
    const int64_t head = job.head * group + row % group;
    float weight = p.value_scale, total = all.d[row];
    if (p.sinks != nullptr) {
      const MergeFactors f = merge_factors(all.m[row], p.sinks[head]);
      weight *= f.first;
      total = total * f.first + f.second;
    }
    const float inverse = all.d[row] == 0.0f ? 0.0f : weight / total;
    const float* o = all.o + int64_t{row} * job.padded_dim;
    float* to = p.out + (token * job.shape->num_q_heads + head) * dim;
    for (int d = 0; d < dim; ++d) to[d] = o[d] * inverse;
  }
}

void merge_splits(const PagedAttentionParams& p, const AttendJob& job, const SplitStates& shared,
                  const SplitStates& own, float* scratch) {
  const StateRows total(scratch, job.num_rows(), job.padded_dim);
  clear_states(job, total);
  for (int i = 0; i < shared.num_splits; ++i) merge_states(job, total, rows_of(shared, i, job.padded_dim));
  for (int i = 0; i < own.num_splits; ++i) merge_states(job, total, rows_of(own, i, job.padded_dim));
  write_result(p, job, total);
}

}  // namespace bequest::BEQUEST_ISA
