// The thread pool of the CPU kernels. One pool per process, sized once at start-up.
//
// [0, count) is cut into chunks, and the chunks into as many ranges as there are threads. Each thread begins
// with its own range, so that kernels that follow each other find their rows in the cache of the same core;
// then it helps with the others': on a busy machine a late thread takes fewer chunks, and nobody waits for
// one that never woke. Results must not depend on which thread runs a chunk.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace bequest {

// Threads that take part in a parallel_for, the caller included. REQUIRES: n >= 1, and no kernel runs
// meanwhile.
void set_num_threads(int n);
int num_threads();

// `worker` < num_threads() numbers the threads that work on the same call.
using ChunkFn = void (*)(void* context, int worker, int64_t begin, int64_t end);
void parallel_for_erased(int64_t count, int64_t grain, ChunkFn fn, void* context);

// f(begin, end) over disjoint chunks of about `grain` items. f must not throw. A nested or concurrent call
// runs serially in its own thread.
template <class F>
void parallel_for(int64_t count, int64_t grain, F&& f) {
  using Fn = std::remove_reference_t<F>;
  parallel_for_erased(
      count, grain,
      [](void* context, int, int64_t begin, int64_t end) { (*static_cast<Fn*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

// f(index, worker) for each index in [0, count), one at a time: for items of uneven size, and for those who
// want memory of their own for each worker.
template <class F>
void for_each_item(int64_t count, F&& f) {
  using Fn = std::remove_reference_t<F>;
  parallel_for_erased(
      count, 1,
      [](void* context, int worker, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) (*static_cast<Fn*>(context))(i, worker);
      },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

}  // namespace bequest
