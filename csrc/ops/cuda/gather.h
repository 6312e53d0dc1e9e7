// Rows of an embedding on the device. The last token of a sequence may not have reached the host yet: its id
// is then given by the sampler row that drew it.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"

namespace bequest::cuda {

struct EmbeddingParams {
  const int32_t* ids;          // [T]: a token, or -(row + 1): the last token of sampler row `row`
  const int32_t* last_tokens;  // [num_rows]; null if no id is negative
  int64_t num_rows;
  const void* weight;  // [V, H], contiguous
  void* out;           // [T, H], contiguous
  DType dtype;
  int64_t num_tokens;
  int64_t vocab_size;
  int64_t hidden;
};

// An id outside the vocabulary (a row that has no last token, say) gives a row of NaN: the device cannot
// throw, and NaN fails that request alone, at its sampling.
void embedding(const EmbeddingParams& p, Stream stream);

}  // namespace bequest::cuda
