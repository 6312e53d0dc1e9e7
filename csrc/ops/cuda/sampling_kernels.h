// The kernels of the sampler, each for another kind of rows. `early`: rows and the step's arrays are what
// they were before the kernel ahead began.
#pragma once

#include "device/stream.h"
#include "ops/cuda/sampling.h"

namespace bequest::cuda::sampler {

// Of the device that clusters are sized for.
inline constexpr int64_t kMultiprocessors = 132;

// Rows that hold their logits in shared memory have clusters of 8 CTAs. So many of those fit at once on an
// H200, whose multiprocessors are not all in groups of a multiple of 8, if each has a multiprocessor's
// memory.
inline constexpr int64_t kHeldRows = 15;

// Greedy rows, rows with a temperature alone, and those that are not open.
void sample_streaming(const SampleParams& p, bool early, Stream stream);
// Rows with filters and no edits, where rows are many.
void sample_filtered(const SampleParams& p, bool early, Stream stream);
// Rows with edits, where rows are many.
void sample_edited(const SampleParams& p, bool early, Stream stream);
// Rows with filters or edits. REQUIRES: p.num <= kHeldRows
void sample_few(const SampleParams& p, bool early, Stream stream);

// f<T, kRuns>() for the logits' type, and whether rows may be there several times.
template <class F>
void dispatch_rows(const SampleParams& p, F&& f) {
  dispatch(p.dtype, [&]<class T>() {
    p.drafts ? f.template operator()<T, true>() : f.template operator()<T, false>();
  });
}

}  // namespace bequest::cuda::sampler
