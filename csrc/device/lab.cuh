// Temporary: what a chain brings to the L2 for the next one, to be timed.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace bequest::cuda::lab {

// Of CTA b `count` tiles from its first one on.
struct Run {
  unsigned long long base;
  int tile_bytes, tiles_each, longer, count;
};
struct Ahead {
  Run runs[6];
  int num_runs, pace, piece;
};

inline Ahead ahead() {
  Ahead a{};
  const char* value = std::getenv("BEQUEST_LAB_NEXT");
  if (value == nullptr) return a;
  int used = 0;
  if (std::sscanf(value, "%d,%d%n", &a.pace, &a.piece, &used) != 2) return a;
  value += used;
  for (; a.num_runs < 6; ++a.num_runs) {
    Run& r = a.runs[a.num_runs];
    if (std::sscanf(value, ";%llu,%d,%d,%d,%d%n", &r.base, &r.tile_bytes, &r.tiles_each, &r.longer, &r.count,
                    &used) != 5)
      break;
    value += used;
  }
  return a;
}

__device__ __forceinline__ unsigned clock() {
  unsigned time;
  asm volatile("mov.u32 %0, %clock;" : "=r"(time)::"memory");
  return time;
}

// By one thread, a piece every `pace` clocks.
__device__ __forceinline__ void bring(const Ahead& a, int block) {
  unsigned last = clock();
  for (int i = 0; i < a.num_runs; ++i) {
    const Run& r = a.runs[i];
    const int first = block * r.tiles_each + min(block, r.longer);
    const unsigned long long from = r.base + static_cast<unsigned long long>(first) * r.tile_bytes;
    const int bytes = r.count * r.tile_bytes;
    for (int at = 0; at < bytes; at += a.piece) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + at),
                   "r"(min(a.piece, bytes - at))
                   : "memory");
      while (clock() - last < static_cast<unsigned>(a.pace)) {
      }
      last = clock();
    }
  }
}

}  // namespace bequest::cuda::lab
