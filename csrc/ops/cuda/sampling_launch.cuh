// What the kernels of the sampler share: which rows are whose, and a CTA's memory.
#pragma once

#include "ops/cuda/sampling_kernels.h"
#include "ops/cuda/sampling_record.cuh"

namespace bequest::cuda::sampler {

// Which rows a kernel takes: those that begin a run, are open, and have filters, or edits, as is said.
template <bool kRuns>
__device__ bool takes(const SampleParams& p, int64_t item, bool filtered, bool edited) {
  const int row_id = p.row_ids[item];
  if (!exists(p, row_id) || !begins_run<kRuns>(p, item)) return false;
  const SamplerRow& row = p.rows[row_id];
  if (row.state == RowState::kClosed) return false;
  return edits(row) ? edited : filtered && filters(row, static_cast<int>(p.vocab_size));
}

// The parts of the memory that a launch gives to a CTA.
struct MemoryPlan {
  int slice_len;  // floats; 0: rows are not held
  int columns;
  int capacity;  // of the list

  size_t bytes() const {
    return slice_len * sizeof(float) + kBins * columns * sizeof(uint32_t) + capacity * sizeof(uint64_t);
  }
  __device__ FilterMemory divide(SearchShared& shared, float4* memory) const {
    auto* slice = reinterpret_cast<float*>(memory);
    auto* table = reinterpret_cast<uint32_t*>(slice + slice_len);
    auto* list = reinterpret_cast<uint64_t*>(table + kBins * columns);
    return {{shared, table, list, columns, capacity}};
  }
};

__device__ inline void begin_lists(SearchShared& shared) {
  if (threadIdx.x == 0) shared.collected[0] = shared.collected[1] = 0;
}

inline LaunchShape shape_of(unsigned clusters, unsigned size, size_t bytes) {
  return {.grid = clusters * size,
          .block = kRowThreads,
          .shared_bytes = bytes,
          .cluster = size,
          .overlaps_previous = true};
}

}  // namespace bequest::cuda::sampler
