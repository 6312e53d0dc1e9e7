// Work items of uneven size, with memory for each worker.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/threads.h"

namespace bequest {

// f(index, worker) for each index in [0, count), handed out one at a time. `worker` < num_workers numbers the
// concurrent callers, so each may own scratch memory; a worker whose thread wakes late finds the work done.
template <class F>
void for_each_item(int64_t count, int num_workers, F&& f) {
  std::atomic<int64_t> next{0};
  parallel_for(std::min<int64_t>(num_workers, count), 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
        f(i, static_cast<int>(worker));
  });
}

}  // namespace bequest
