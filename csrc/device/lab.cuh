// Temporary: clock stamps, and switches of variants that are timed side by side.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace bequest::cuda::lab {

using Stamp = unsigned long long;
inline constexpr int kStamps = 64;  // of a CTA

inline Stamp* trace() {
  const char* value = std::getenv("BEQUEST_LAB_TRACE");
  return value == nullptr ? nullptr : reinterpret_cast<Stamp*>(std::strtoull(value, nullptr, 10));
}

// Rows that are brought to the L2 for the chain behind: of block b `count` tiles from its first one on.
struct Run {
  unsigned long long base;
  int tile_bytes, tiles_each, longer, count;
};
struct Ahead {
  Run runs[6];
  int num_runs, place, piece;
  Stamp* trace;
};

inline Ahead ahead() {
  Ahead a{};
  a.trace = trace();
  const char* value = std::getenv("BEQUEST_LAB_AHEAD");
  if (value == nullptr) return a;
  int used = 0;
  if (std::sscanf(value, "%d,%d%n", &a.place, &a.piece, &used) != 2) return a;
  value += used;
  for (; a.num_runs < 6; ++a.num_runs) {
    Run& r = a.runs[a.num_runs];
    if (std::sscanf(value, ";%llu,%d,%d,%d,%d%n", &r.base, &r.tile_bytes, &r.tiles_each, &r.longer, &r.count, &used) != 5) break;
    value += used;
  }
  return a;
}

__device__ __forceinline__ Stamp global_time() {
  Stamp time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
__device__ __forceinline__ Stamp clock() {
  Stamp time;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(time)::"memory");
  return time;
}
__device__ __forceinline__ void stamp(Stamp* trace, int i) {
  if (trace != nullptr) trace[i] = clock();
}

// By a warp.
__device__ __forceinline__ void bring(const Ahead& a, int block, int lane) {
  for (int i = 0; i < a.num_runs; ++i) {
    const Run& r = a.runs[i];
    const int first = block * r.tiles_each + min(block, r.longer);
    const unsigned long long from = r.base + static_cast<unsigned long long>(first) * r.tile_bytes;
    const int bytes = r.count * r.tile_bytes;
    for (int at = lane * a.piece; at < bytes; at += 32 * a.piece)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + at), "r"(min(a.piece, bytes - at))
                   : "memory");
  }
}

}  // namespace bequest::cuda::lab
