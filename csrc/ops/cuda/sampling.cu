// A cluster of CTAs per row. Which kernels there are: sampling_kernels.h.
#include "ops/cuda/sampling.h"

#include "device/launch.cuh"
#include "ops/cuda/sampling_kernels.h"
#include "ops/cuda/vocab_row.cuh"

namespace bequest::cuda {
namespace {

__global__ void update_rows_kernel(const RowUpdateParams p) {
  const RowUpdate& update = p.updates[blockIdx.x];
  if (threadIdx.x == 0) {
    p.rows[update.row] = update.state;
    p.last_tokens[update.row] = update.last_token;
  }
  for (int i = threadIdx.x; i < update.payload_len; i += blockDim.x)
    update.state.storage[i] = p.payload[update.payload_begin + i];
}

}  // namespace

void update_rows(const RowUpdateParams& p, Stream stream) {
  launch(update_rows_kernel, {static_cast<unsigned>(p.num_updates), 128}, stream, p);
}

void sample(const SampleParams& p, Stream stream) {
  check(p.vocab_size >= 1 && p.vocab_size <= kMaxVocab, "sample: vocabulary outside [1, 416000]");
  check(p.stride >= p.vocab_size || p.num <= 1, "sample: rows overlap");
  check(!p.guesses || !p.drafts, "sample: a guess is of one token");
  const bool early = is_captured(stream) && !p.guesses;
  sampler::sample_streaming(p, early, stream);
  if (p.num <= sampler::kHeldRows) return sampler::sample_few(p, early, stream);
  // In this order: the last token that is held back moves a row from those with edits to the others.
  sampler::sample_filtered(p, early, stream);
  sampler::sample_edited(p, early, stream);
}

}  // namespace bequest::cuda
