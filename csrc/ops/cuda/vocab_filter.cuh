// What min_p, top_k and top_p leave of a row, and the draw among it.
//
// Lists of up to 512 (top_k) are collected at once: values that as many threads reach as tokens are wanted
// are reached by few tokens. A nucleus is cut in octaves of weight first. What can be in it then lies in
// lists, if there is room, and only the octave in which it ends is looked at more closely.
#pragma once

#include "ops/cuda/row_edits.cuh"
#include "ops/cuda/vocab_draw.cuh"
#include "ops/cuda/vocab_mass.cuh"
#include "ops/cuda/vocab_select.cuh"

namespace bequest::cuda {

// The row in the slice.
struct HeldRow {
  RowCluster& row;

  // f(x [kUnit], id of the first) over this thread's part, after_unit() by whole warps.
  template <bool kBackward = false, class F, class G>
  __device__ __forceinline__ void for_each_unit(F&& f, G&& after_unit) const {
    for (unsigned base = 0; base < row.units(); base += kRowThreads) {
      const unsigned unit = base + threadIdx.x;
      if (unit < row.units()) {
        float x[kUnit];
        row.load_unit(static_cast<int>(unit), x);
        f(x, row.begin() + static_cast<int>(unit) * kUnit);
      }
      after_unit();
    }
  }
};

// The row in device memory, which each pass reads anew.
template <class T>
struct ReadRow {
  RowCluster& row;
  const T* logits;
  bool aligned;
  const uint8_t* mask;  // null: none

  template <bool kBackward = false, class F, class G>
  __device__ __forceinline__ void for_each_unit(F&& f, G&& after_unit) const {
    row.for_each_packed<8 / sizeof(T), kBackward>(
        logits, aligned,
        [&](float (&x)[kUnit], int unit) {
          const int first = row.begin() + unit * kUnit;
          if (mask) apply_mask(x, first);
          f(x, first);
        },
        after_unit);
  }
  __device__ __forceinline__ void apply_mask(float (&x)[kUnit], int first) const {
    const unsigned allowed = mask[first / kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
      if ((allowed >> i & 1) == 0) x[i] = -INFINITY;
  }
};

// f(x, id) of the tokens of this thread's part from `lowest` on.
template <bool kBackward = false, class Row, class F>
__device__ __forceinline__ void for_each_from(const Row& row, float lowest, F&& f) {
  row.template for_each_unit<kBackward>(
      [&](const float (&x)[kUnit], int first) {
        float most = x[0];
#pragma unroll
        for (int i = 1; i < kUnit; ++i) most = fmaxf(most, x[i]);
        if (!(most >= lowest)) return;
#pragma unroll
        for (int i = 0; i < kUnit; ++i)
          if (x[i] >= lowest) f(x[i], first + i);
      },
      [] {});
}

// The tokens in this CTA's list. REQUIRES: a barrier behind the last that was put there
struct ListedTokens {
  const uint64_t* list;
  int num;
};
template <bool kBackward = false, class F>
__device__ __forceinline__ void for_each_from(const ListedTokens& tokens, float lowest, F&& f) {
  for (int i = threadIdx.x; i < tokens.num; i += kRowThreads) {
    const float x = ranked_value(tokens.list[i]);
    if (x >= lowest) f(x, ranked_id(tokens.list[i]));
  }
}

// Ranked keys without the bits that no id has.
inline constexpr int kIdBits = 19;
static_assert(kMaxVocab < 1 << kIdBits);
__device__ __forceinline__ uint64_t narrow_rank(float x, int id) {
  return uint64_t{ordered(x)} << kIdBits | static_cast<unsigned>((1 << kIdBits) - 1 - id);
}
__device__ __forceinline__ RowCutoff cutoff_at(uint64_t rank) {
  return {from_ordered(static_cast<uint32_t>(rank >> kIdBits)),
          (1 << kIdBits) - 1 - static_cast<int>(rank & ((1 << kIdBits) - 1))};
}

// top_k and top_p on the `n` best tokens, sorted in this CTA, and the draw among what they leave.
__device__ inline int draw_from_sorted(ClusterShared& shared, const SamplerRow& row, float row_max,
                                       const RowDrawKey& key, int n) {
  n = min(n, row.top_k);
  constexpr int kEach = kSortable / kRowThreads;
  const int first = threadIdx.x * kEach;
  const auto value = [&](int i) { return ranked_value(shared.sorted[i]); };
  const auto weight = [&](int i) {
    return static_cast<double>(weight_of(value(i), row_max, row.inverse_temperature));
  };
  int last = n;  // tokens before it are kept
  if (row.top_p < 1) {
    double mine = 0;
    for (int i = first; i < min(first + kEach, n); ++i) mine += weight(i);
    auto* parts = reinterpret_cast<double*>(shared.warp_part);
    double before = block_exclusive_sum(mine, parts);
    if (threadIdx.x == kRowThreads - 1) parts[0] = before + mine;
    __syncthreads();
    const double target = row.top_p * parts[0];
    for (int i = first; i < min(first + kEach, n); ++i) {
      if (i > 0 && before >= target) last = min(last, i);
      before += weight(i);
    }
    __syncthreads();
    last =
        block_reduce(last, reinterpret_cast<int*>(shared.warp_part), [](int a, int b) { return min(a, b); });
  }
  uint64_t best = 0;
  for (int i = threadIdx.x; i < last; i += kRowThreads) {
    const int id = ranked_id(shared.sorted[i]);
    best = max(best, ranked(score_of(value(i), id, row.inverse_temperature, key), id));
  }
  __syncthreads();
  return ranked_id(block_reduce(best, reinterpret_cast<uint64_t*>(shared.total),
                                [](uint64_t a, uint64_t b) { return a > b ? a : b; }));
}

template <class Row>
class Filter {
 public:
  __device__ Filter(RowCluster& row, const Row& tokens, const SearchMemory& memory, unsigned& turn,
                    const SamplerRow& params, float max, const RowDrawKey& key)
      : row_(row),
        tokens_(tokens),
        memory_(memory),
        turn_(turn),
        params_(params),
        max_(max),
        key_(key),
        histogram_(row, memory),
        weigh_(max, params.inverse_temperature) {}

  // The token, in rank 0. `bound`: with a short list, what no fewer tokens than it is to have reach.
  __device__ int draw(int vocab, float bound) {
    const float floor = params_.min_p_offset == -INFINITY ? -FLT_MAX : __fadd_rn(max_, params_.min_p_offset);
    RowCutoff kept{fmaxf(floor, -FLT_MAX), INT_MAX};
    const bool limits_number = params_.top_k > 0 && params_.top_k < vocab;
    if (limits_number && params_.top_k <= kSortable / 2) return draw_short(kept, bound);
    if (limits_number) kept = cut_number(kept);
    return params_.top_p < 1 ? draw_nucleus(kept) : draw_all(kept);
  }

 private:
  // --- lists in rank 0

  // Where a token goes in rank 0's list; kSortable or more: there is no room.
  __device__ __forceinline__ void collect(float x, int id) {
    const unsigned at = atomicAdd(row_.of_rank(&memory_.shared.collected[turn_], 0), 1u);
    if (at < kSortable) row_.of_rank(row_.shared().sorted, 0)[at] = ranked(x, id);
  }
  // Behind the barrier after the last collect(): how many there are; more than kSortable: some are lost. All
  // meet at least once before the next list begins.
  __device__ int num_collected() {
    const unsigned num = *row_.of_rank(&memory_.shared.collected[turn_], 0);
    turn_ ^= 1;
    // The other number was read before that barrier.
    if (row_.leads() && threadIdx.x == 0) memory_.shared.collected[turn_] = 0;
    return static_cast<int>(min(num, static_cast<unsigned>(kSortable + 1)));
  }

  // --- top_k

  __device__ int draw_short(RowCutoff kept, float bound) {
    int n = collect_from(fmaxf(kept.value, bound), kept);
    if (n > kSortable) {
      kept = cut_number(kept);
      n = collect_from(kept.value, kept);
    }
    if (!row_.leads()) return 0;
    sort_descending(row_.shared().sorted, n);
    return draw_from_sorted(row_.shared(), params_, max_, key_, n);
  }
  __device__ int collect_from(float lowest, RowCutoff kept) {
    for_each_from<true>(tokens_, lowest, [&](float x, int id) {
      if (kept.keeps(x, id)) collect(x, id);
    });
    row_.sync();
    return num_collected();
  }
  __device__ RowCutoff cut_number(RowCutoff kept) {
    const auto one = [&](float x, int id) { return kept.keeps(x, id) ? 1u : 0u; };
    return cut(tokens_, kept.value, max_, params_.top_k, one, 1, kept);
  }

  // --- top_p

  __device__ int draw_nucleus(RowCutoff kept) {
    if (threadIdx.x == 0) memory_.shared.listed = 0;
    histogram_.clear();
    kept.value > -FLT_MAX ? add_octaves<false>(kept) : add_octaves<true>(kept);
    const uint64_t mine = histogram_.sum();
    const int lane = threadIdx.x % kWarp;
    const double scale = __hiloint2double((1023 - lane) << 20, 0);  // 2^-lane
    const double until = lanes_until(static_cast<double>(mine) * scale);
    const double target = params_.top_p * __shfl_sync(kAllLanes, until, kWarp - 1);
    // Rounding may make a sum grow, or not, where there are no tokens.
    const unsigned there_are = __ballot_sync(kAllLanes, mine > 0);
    const unsigned reached = __ballot_sync(kAllLanes, until >= target) & there_are;
    const int octave =
        reached ? __ffs(static_cast<int>(reached)) - 1 : 31 - __clz(static_cast<int>(there_are));
    const double before = __shfl_sync(kAllLanes, until, max(octave - 1, 0));
    const uint64_t there = __shfl_sync(kAllLanes, mine, octave);
    const double missing =
        ceil((target - (octave > 0 ? before : 0.0)) / __shfl_sync(kAllLanes, scale, octave));
    const uint64_t need = min(max(static_cast<uint64_t>(fmax(missing, 0.0)), uint64_t{1}), there);
    const uint64_t until_here = __shfl_sync(kAllLanes, lanes_until(mine), octave);
    return draw_from_octaves(kept, octave, need, there, until_here);
  }

  // kAll: what `kept` does not keep is -inf, and has no mass.
  template <bool kAll>
  __device__ __forceinline__ void add_octaves(RowCutoff kept) {
    tokens_.template for_each_unit<true>(
        [&](const float (&x)[kUnit], int first) {
#pragma unroll
          for (int i = 0; i < kUnit; ++i) {
            const Weight weight = weigh_(x[i]);
            histogram_.add(weight.octave, kAll || kept.keeps(x[i], first + i) ? weight.mass : 0);
          }
        },
        [] {});
  }

  // The nucleus ends in `octave`, where its tokens have the mass `need`; all tokens there have `there`, with
  // those of the octaves above `until_here`, each mass as in its own octave.
  __device__ int draw_from_octaves(RowCutoff kept, int octave, uint64_t need, uint64_t there,
                                   uint64_t until_here) {
    const bool few = octave < kBins - 1 && there <= uint64_t{kSortable} * kLeastMass;
    const uint64_t to_list = few ? until_here - there : until_here;
    const auto mass = [&](float x, int id) {
      const Weight weight = weigh_(x);
      return weight.octave == octave && kept.keeps(x, id) ? weight.mass : 0u;
    };
    const int least = octave < kBins - 1 ? kLeastMass : 0;
    if (to_list <= (uint64_t{1} << kMassBits) * memory_.capacity * row_.size()) {
      for_each_from(tokens_, fmaxf(kept.value, weigh_.below(octave)), [&](float x, int id) {
        const int here = weigh_(x).octave;
        if (here > octave || !kept.keeps(x, id)) return;
        if (few && here == octave) return collect(x, id);
        const unsigned at = atomicAdd(&memory_.shared.listed, 1u);
        if (at < static_cast<unsigned>(memory_.capacity)) memory_.list[at] = ranked(x, id);
      });
      __syncthreads();
      const unsigned listed = memory_.shared.listed;
      const bool fits = listed <= static_cast<unsigned>(memory_.capacity);
      if (!fits && threadIdx.x == 0)
        atomicAdd(row_.of_rank(&memory_.shared.collected[turn_], 0), kSortable + 1u);
      const ListedTokens tokens{memory_.list, fits ? static_cast<int>(listed) : 0};
      if (few) {
        const uint64_t best = best_of_list(tokens, RowCutoff{-INFINITY, INT_MAX});
        const int n = num_collected();
        if (n <= kSortable) return row_.leads() ? draw_rest(best, n, need) : 0;
      } else {
        row_.sync();
        if (num_collected() == 0) {
          const RowCutoff last =
              cut(tokens, weigh_.below(octave), weigh_.above(octave), need, mass, least, kept);
          return ranked_id(best_of_list(tokens, last));
        }
      }
    }
    return draw_all(cut(tokens_, weigh_.below(octave), weigh_.above(octave), need, mass, least, kept));
  }

  // The best score among what the list has until `last`, in rank 0.
  __device__ uint64_t best_of_list(const ListedTokens& tokens, RowCutoff last) {
    uint64_t best[2] = {0, 0};
    for_each_from(tokens, last.value, [&](float x, int id) {
      if (last.keeps(x, id))
        best[0] = max(best[0], ranked(score_of(x, id, params_.inverse_temperature, key_), id));
    });
    best[0] = warp_reduce(best[0], [](uint64_t a, uint64_t b) { return a > b ? a : b; });
    row_.find_largest(best);
    return best[0];
  }

  // By rank 0: `best` so far, and those of its `n` collected tokens that make up the mass `need`.
  __device__ int draw_rest(uint64_t best, int n, uint64_t need) {
    ClusterShared& shared = row_.shared();
    sort_descending(shared.sorted, n);
    const int last = find_crossing(n, need, [&](float x) { return weigh_(x).mass; });
    for (int i = threadIdx.x; i <= min(last, n - 1); i += kRowThreads) {
      const int id = ranked_id(shared.sorted[i]);
      const float score = score_of(ranked_value(shared.sorted[i]), id, params_.inverse_temperature, key_);
      best = max(best, ranked(score, id));
    }
    return ranked_id(block_reduce(best, reinterpret_cast<uint64_t*>(shared.total),
                                  [](uint64_t a, uint64_t b) { return a > b ? a : b; }));
  }

  // The first of the `n` sorted tokens at which the sum of measure(x) reaches `need`.
  template <class Measure>
  __device__ int find_crossing(int n, uint64_t need, Measure&& measure) {
    ClusterShared& shared = row_.shared();
    if (threadIdx.x == 0) shared.crossing = INT_MAX;  // the scan below has a barrier
    constexpr int kEach = kSortable / kRowThreads;
    const int first = threadIdx.x * kEach;
    uint64_t of[kEach], mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      of[i] = first + i < n ? measure(ranked_value(shared.sorted[first + i])) : 0;
      mine += of[i];
    }
    uint64_t sum = block_exclusive_sum(mine, reinterpret_cast<uint64_t*>(shared.warp_part));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (sum < need && sum + of[i] >= need) shared.crossing = first + i;
      sum += of[i];
    }
    __syncthreads();
    return shared.crossing;
  }

  // --- a cutoff

  // Where the best of `tokens` in [low, high] have the sum `need` of measure(x, id); `all`, if none have so
  // much. `least`: of a measure that is not 0; 0: it is not known.
  template <class Tokens, class Measure>
  __device__ RowCutoff cut(const Tokens& tokens, float low, float high, uint64_t need, Measure&& measure,
                           int least, RowCutoff all) {
    uint64_t first = narrow_rank(low, (1 << kIdBits) - 1), last = narrow_rank(high, 0);
    while (true) {
      const int shift = max(0, 59 - __clzll(static_cast<long long>(last - first)));
      histogram_.clear();
      for_each_from(tokens, low, [&](float x, int id) {
        const uint64_t rank = narrow_rank(x, id);
        if (rank < first || rank > last) return;
        if (const uint32_t part = measure(x, id))
          histogram_.add(static_cast<int>((last - rank) >> shift), part);
      });
      const uint64_t mine = histogram_.sum();
      const uint64_t until = lanes_until(mine);
      const unsigned reached = __ballot_sync(kAllLanes, until >= need);
      if (reached == 0) return all;
      const int bin = __ffs(static_cast<int>(reached)) - 1;
      const uint64_t there = __shfl_sync(kAllLanes, mine, bin);
      need -= __shfl_sync(kAllLanes, until, bin) - there;
      last -= static_cast<uint64_t>(bin) << shift;
      first = max(first, last - ((uint64_t{1} << shift) - 1));
      low = fmaxf(low, cutoff_at(first).value);
      if (shift == 0) return cutoff_at(last);
      if (least > 0 && there <= uint64_t{kSortable} * static_cast<unsigned>(least)) break;
    }
    for_each_from(tokens, low, [&](float x, int id) {
      const uint64_t rank = narrow_rank(x, id);
      if (rank >= first && rank <= last && measure(x, id) > 0) collect(x, id);
    });
    row_.sync();
    const int n = num_collected();
    ClusterShared& shared = row_.shared();
    if (row_.leads()) {
      sort_descending(shared.sorted, n);
      const int at = min(find_crossing(n, need, [&](float x) { return measure(x, 0); }), n - 1);
      if (threadIdx.x == 0) shared.cutoff = {ranked_value(shared.sorted[at]), ranked_id(shared.sorted[at])};
    }
    row_.sync();
    return *row_.of_rank(&shared.cutoff, 0);
  }

  // --- the draw

  __device__ int draw_all(RowCutoff kept) {
    Draw draw(row_.shared(), params_.inverse_temperature, key_);
    draw.start();
    tokens_.for_each_unit([&](const float (&x)[kUnit], int first) { draw.offer(x, first, kept); },
                          [&] { draw.publish(); });
    uint64_t best[2] = {warp_reduce(draw.best(), [](uint64_t a, uint64_t b) { return a > b ? a : b; }), 0};
    row_.find_largest(best);
    return ranked_id(best[0]);
  }

  RowCluster& row_;
  const Row& tokens_;
  const SearchMemory& memory_;
  unsigned& turn_;  // of the lists in rank 0
  const SamplerRow& params_;
  const float max_;
  const RowDrawKey key_;
  Histogram histogram_;
  const Weigher weigh_;
};

}  // namespace bequest::cuda
