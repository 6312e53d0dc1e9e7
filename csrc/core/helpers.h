// A few threads beside those of the kernels, for work that is done in the thread of whoever asks for it: an
// image is prepared while steps run. They are started when they are first needed and never end: starting one
// may take as long as the work.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace bequest {

// Threads that help, beside the one that asks.
int num_helpers();

using PartFn = void (*)(void* context, int part);
void run_parts_erased(int num_parts, PartFn fn, void* context);

// f(part) for each part in [0, num_parts), by the caller and by whoever is free; returns when all have ended.
// f must not throw.
template <class F>
void run_parts(int num_parts, F&& f) {
  using Fn = std::remove_reference_t<F>;
  run_parts_erased(
      num_parts, [](void* context, int part) { (*static_cast<Fn*>(context))(part); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

// What memcpy does: a core alone copies an image of three megabytes in a millisecond.
void copy_in_parts(void* to, const void* from, size_t bytes);

}  // namespace bequest
