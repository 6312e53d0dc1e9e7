// What a GPU's attention has to do in a step, as Python holds it.
#pragma once

#include <cstdint>

#include "attention/cuda/work_list.h"

namespace bequest {

// Memory that calls leave as they found it, or that means nothing between them: attention/cuda/attention.h.
struct Scratch {
  float* state_values;
  float* state_scales;
  int32_t* tickets;
  uint32_t* mail;
};

// A work shape with its layout: what the kernels and the list's writer share.
struct AttentionWork {
  WorkShape shape;
  WorkListLayout layout;
  Scratch scratch;
};

}  // namespace bequest
