// The k largest of a stream of 64-bit keys, by one CTA, without sorting the stream.
//
// Keys that may be among the k best are put into shared memory. When it is full, a binary search over keys
// finds a value that keeps the k best and few more; the others leave, and what comes later has to reach it.
// The k best of distinct keys are one set, whatever the order in which they came: the result depends neither
// on the timing of threads nor on the memory's size.
#pragma once

#include "device/reductions.cuh"
#include "ops/cuda/vocab_select.cuh"

namespace bequest::cuda {

struct BestKeysShared {
  unsigned count;        // keys in the buffer, or more where some did not fit
  unsigned counters[3];  // of a BlockCounter: one in use, one ready, one being cleared
  uint64_t warp_part[kRowWarps];
};

// Sums over the CTA, one after another, with one barrier each.
class BlockCounter {
 public:
  // REQUIRES: a barrier before the first sum, and one after the last sum of an earlier counter.
  __device__ explicit BlockCounter(BestKeysShared& shared) : counters_(shared.counters) {
    if (threadIdx.x < 3) counters_[threadIdx.x] = 0;
  }

  __device__ __forceinline__ int sum(unsigned mine) {
    mine = __reduce_add_sync(kAllLanes, mine);
    if (threadIdx.x % kWarp == 0 && mine > 0) atomicAdd(&counters_[turn_], mine);
    __syncthreads();
    const auto total = static_cast<int>(counters_[turn_]);
    turn_ = turn_ == 2 ? 0 : turn_ + 1;
    // Its readers have passed this barrier, and nobody adds to it before the next.
    if (threadIdx.x == 0) counters_[turn_ == 2 ? 0 : turn_ + 1] = 0;
    return total;
  }

 private:
  unsigned* counters_;
  int turn_ = 0;
};

// The lowest key of a value above -inf.
__device__ __forceinline__ uint64_t lowest_finite_key() { return uint64_t{ordered(-FLT_MAX)} << 32; }

// The first of `mine` consecutive slots for this thread. REQUIRES: whole warps.
__device__ __forceinline__ unsigned reserve_slots(unsigned& count, int mine) {
  const int lane = threadIdx.x % kWarp;
  int sum = mine;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += before;
  }
  unsigned base = 0;
  if (lane == kWarp - 1) base = atomicAdd(&count, static_cast<unsigned>(sum));
  return __shfl_sync(kAllLanes, base, kWarp - 1) + static_cast<unsigned>(sum - mine);
}

// Puts replace(i) in front of `values` for each of its first n for which stays(value); their number is
// shared.count. What is overwritten has been read already.
template <class V, class Stays, class Replace>
__device__ void compress(BestKeysShared& shared, V* values, int n, Stays&& stays, Replace&& replace) {
  if (threadIdx.x == 0) shared.count = 0;
  for (int base = 0; base < n; base += kRowThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const V value = i < n ? values[i] : V{};
    const bool kept = i < n && stays(value);
    __syncthreads();
    const unsigned slot = reserve_slots(shared.count, kept);
    if (kept) values[slot] = replace(i, value);
  }
  __syncthreads();
}

// Leaves at least k and at most `limit` of keys [n], the best, and returns a floor that they alone reach.
// REQUIRES: k <= limit, k <= n, distinct keys that all threads see and that reach `floor`.
__device__ __noinline__ uint64_t keep_best(BestKeysShared& shared, uint64_t* keys, int n, int k, int limit,
                                           uint64_t floor) {
  uint64_t mine = 0;
  for (int i = threadIdx.x; i < n; i += kRowThreads) mine = max(mine, keys[i]);
  BlockCounter counter(shared);
  const auto larger = [](uint64_t a, uint64_t b) { return max(a, b); };
  uint64_t high = block_reduce(mine, shared.warp_part, larger) + 1;  // fewer than k keys reach it
  uint64_t low = floor;                                              // at least k keys reach it
  for (int kept = n; kept > limit && high - low > 1;) {
    const uint64_t middle = low + (high - low) / 2;
    unsigned reach = 0;
    for (int i = threadIdx.x; i < n; i += kRowThreads) reach += keys[i] >= middle;
    const int count = counter.sum(reach);
    if (count >= k) {
      low = middle;
      kept = count;
    } else {
      high = middle;
    }
  }
  compress(shared, keys, n, [&](uint64_t key) { return key >= low; }, [](int, uint64_t key) { return key; });
  return low;
}

// REQUIRES: kRowThreads threads, all of which call every method.
class BestKeys {
 public:
  // `keys`: shared memory [capacity], a power of two >= 2 k.
  __device__ BestKeys(BestKeysShared& shared, uint64_t* keys, int capacity, int k)
      : shared_(shared), keys_(keys), capacity_(capacity), k_(k), floor_(lowest_finite_key()) {
    clear();
  }

  // Forgets all keys, not the floor; for those who use `shared` meanwhile.
  __device__ void clear() {
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
  }

  // Keys below it are not among the k best.
  __device__ RowCutoff floor() const {
    const auto lowest_id_part = static_cast<uint32_t>(floor_);
    return {ranked_value(floor_), static_cast<int>(min(0xffffffffu - lowest_id_part, 0x7fffffffu))};
  }
  __device__ bool reaches(uint64_t key) const { return key >= floor_; }
  // REQUIRES: at least k keys of the stream reach it; the same in all threads.
  __device__ void raise_floor(uint64_t key) { floor_ = max(floor_, key); }

  // Takes key_of(i) for each bit i of `pending`. key_of is asked again for what did not fit at once: it had
  // better read memory than hold registers.
  template <class KeyOf>
  __device__ __forceinline__ void offer(uint32_t pending, KeyOf&& key_of) {
    for (;;) {
      if (__any_sync(kAllLanes, pending != 0)) {
        unsigned slot = reserve_slots(shared_.count, __popc(pending));
        for (; pending != 0 && slot < static_cast<unsigned>(capacity_); pending &= pending - 1)
          keys_[slot++] = key_of(__ffs(static_cast<int>(pending)) - 1);
      }
      if (!__syncthreads_or(pending != 0)) return;
      floor_ = keep_best(shared_, keys_, capacity_, k_, k_ + (capacity_ - k_) / 4, floor_);
      for (uint32_t left = pending; left != 0; left &= left - 1)
        if (key_of(__ffs(static_cast<int>(left)) - 1) < floor_) pending &= ~(left & -left);
    }
  }

  // Sorts the best, largest first; their number. Nothing can be offered afterwards.
  __device__ int finish() {
    __syncthreads();
    if (shared_.count > 2u * k_) keep_best(shared_, keys_, shared_.count, k_, 2 * k_, floor_);
    const auto count = static_cast<int>(shared_.count);
    sort_descending(keys_, count);
    return min(count, k_);
  }

 private:
  BestKeysShared& shared_;
  uint64_t* keys_;
  const int capacity_;
  const int k_;
  uint64_t floor_;
};

}  // namespace bequest::cuda
