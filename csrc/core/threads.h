// The thread pool of the CPU kernels. One pool per process, sized once at start-up.
//
// parallel_for hands out chunks of [0, count) dynamically: on a busy machine a late thread takes fewer chunks
// and nobody waits for one that never woke. Results must not depend on which thread runs a chunk.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace bequest {

// Threads that take part in a parallel_for, the caller included. REQUIRES: n >= 1, and no kernel runs
// meanwhile.
void set_num_threads(int n);
int num_threads();

using ChunkFn = void (*)(void* context, int64_t begin, int64_t end);
void parallel_for_erased(int64_t count, int64_t grain, ChunkFn fn, void* context);

// f(begin, end) over disjoint chunks of about `grain` items. f must not throw. A nested or concurrent call
// runs serially in its own thread.
template <class F>
void parallel_for(int64_t count, int64_t grain, F&& f) {
  using Fn = std::remove_reference_t<F>;
  parallel_for_erased(
      count, grain,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<Fn*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

}  // namespace bequest
