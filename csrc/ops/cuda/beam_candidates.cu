// A CTA per row, then a CTA per group. A row's logits stream through registers once, without a barrier: the
// sum of the softmax is kept up with a running maximum, and the maximum of each set of neighbouring tokens
// goes to shared memory. The k-th largest of these is a lower bound of the row's k-th best, so that only the
// few sets that reach it are looked at again. Within a row the normaliser changes no order; it is needed only
// when rows meet. One CTA per row, however many rows there are: the order of additions, and so a row's
// scores, do not depend on the batch.
#include <algorithm>

#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/beam_candidates.h"
#include "ops/cuda/best_keys.cuh"

namespace bequest::cuda {
namespace {

constexpr int kEach = 4;  // keys that a thread offers at a time where they are not a row's own logits

// What a row leaves for its group. Its candidates are ranked(edited logit, token) keys, best first.
struct RowResult {
  double log_sum;
  int32_t count;
  int32_t reserved;
};

struct Workspace {
  RowResult* rows;  // [R]
  uint64_t* keys;   // [slots]

  __host__ __device__ Workspace(void* memory, int64_t num_rows)
      : rows(static_cast<RowResult*>(memory)), keys(reinterpret_cast<uint64_t*>(rows + num_rows)) {}
};

// Of one row, as all its threads see it.
template <class T>
struct Row {
  const T* logits;  // [V]
  bool aligned;
  int vocab;
  const BeamGroup* group = nullptr;
  int num_edits = 0;
  const uint32_t* allowed = nullptr;

  __device__ bool allows(int token) const {
    return allowed == nullptr || (allowed[token / 32] >> (token % 32) & 1) != 0;
  }

  // The index of the edit of a token; -1: it has none.
  __device__ int find_edit(int token) const {
    int low = 0;
    for (int high = num_edits; low < high;) {
      const int middle = (low + high) / 2;
      if (group->edit_ids[middle] < token)
        low = middle + 1;
      else
        high = middle;
    }
    return low < num_edits && group->edit_ids[low] == token ? low : -1;
  }

  __device__ float edited(int token) const {
    if (!allows(token)) return -INFINITY;
    const int edit = find_edit(token);
    const float logit = widen(logits[token]);
    return edit < 0 ? logit : __fadd_rn(logit, group->edit_values[edit]);
  }
};

// What a thread holds of a row at a time, as it came from memory: kUnits times kUnit neighbouring tokens, the
// units of a CTA's threads side by side. There are two of these per thread, the one that is looked at and the
// one that is on its way.
template <class T>
class Tile {
 public:
  static constexpr int kUnits = 8 / sizeof(T);
  static constexpr int kSize = kUnits * kUnit;
  static constexpr int kStep = kSize * kRowThreads;

  __device__ static int id(int base, int i) {
    return base + (i / kUnit * kRowThreads + static_cast<int>(threadIdx.x)) * kUnit + i % kUnit;
  }

  // Tokens behind the end are -inf.
  __device__ __forceinline__ void load(const Row<T>& row, int base) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int first = id(base, i * kWide);
      if (row.aligned && first + kWide <= row.vocab) {
        raw_[i].raw = *reinterpret_cast<const Raw*>(row.logits + first);
      } else {
#pragma unroll
        for (int j = 0; j < kWide; ++j)
          set(raw_[i], j, first + j < row.vocab ? widen(row.logits[first + j]) : -INFINITY);
      }
    }
  }

  // REQUIRES: i is known when this is compiled.
  __device__ __forceinline__ float operator[](int i) const {
    float x[kWide];
    unpack<T, kWide>(raw_[i / kWide], x);
    return x[i % kWide];
  }

  // Of what may follow.
  __device__ __forceinline__ float max_of_allowed(const Row<T>& row, int base) const {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int token = id(base, i);
      if (token < row.vocab && row.allows(token)) most = fmaxf(most, (*this)[i]);
    }
    return most;
  }

  __device__ __forceinline__ float max() const {
    float most = (*this)[0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) most = fmaxf(most, (*this)[i]);
    return most;
  }

 private:
  static constexpr int kWide = kVectorWidth<T>;
  static constexpr int kVectors = kSize / kWide;
  using Vector = Packed<T, kWide>;
  using Raw = typename Vector::Raw;

  __device__ static void set(Vector& vector, int i, float x) {
    if constexpr (sizeof(T) == 4) {
      vector.word[i] = __float_as_uint(x);
    } else {
      const uint32_t half = __float_as_uint(x) >> 16;
      vector.word[i / 2] = i % 2 == 0 ? half : vector.word[i / 2] | half << 16;
    }
  }

  Vector raw_[kVectors];
};

// Σ exp(x) of a thread's logits, relative to their maximum. A NaN or +inf makes it NaN.
struct RunningSum {
  float max = -FLT_MAX;
  float sum = 0;

  template <class T>
  __device__ __forceinline__ void add(const Tile<T>& x, float most) {
    if (most > max) {
      sum *= __expf(max - most);
      max = most;
    }
#pragma unroll
    for (int i = 0; i < Tile<T>::kSize; ++i) sum += __expf(x[i] - max);
  }
};

// log Σ exp over the CTA; NaN if the row has no softmax.
__device__ double all_log_sum(const RunningSum& mine, BestKeysShared& shared) {
  const float max = block_reduce(mine.max, reinterpret_cast<float*>(shared.warp_part),
                                 [](float a, float b) { return fmaxf(a, b); });
  __syncthreads();
  const double scaled = static_cast<double>(mine.sum) * static_cast<double>(__expf(mine.max - max));
  const double sum = block_reduce(scaled, reinterpret_cast<double*>(shared.warp_part),
                                  [](double a, double b) { return a + b; });
  __syncthreads();
  return sum > 0 ? max + log(sum) : __longlong_as_double(0x7ff8000000000000ll);
}

// The sets of a row: set s is the tile s / kRowThreads of thread s % kRowThreads.
template <class T>
constexpr int num_sets(int64_t vocab) {
  return static_cast<int>(ceil_div(vocab, Tile<T>::kStep)) * kRowThreads;
}

// All tokens into the sum and, with `maxima` [sets], the ordered() maximum of what may follow in each set.
// `next` is the first tile.
template <class T>
__device__ RunningSum stream(const Row<T>& row, Tile<T>& next, uint32_t* maxima) {
  RunningSum sum;
  for (int base = 0; base < row.vocab; base += Tile<T>::kStep) {
    const Tile<T> x = next;
    if (base + Tile<T>::kStep < row.vocab) next.load(row, base + Tile<T>::kStep);
    const float most = x.max();
    sum.add(x, most);
    if (maxima != nullptr) {
      *maxima = ordered(row.allowed == nullptr ? most : x.max_of_allowed(row, base));
      maxima += kRowThreads;
    }
  }
  return sum;
}

// A value that at least `wanted` of values [n] reach, and hardly more; 0 if there are fewer. Only the upper
// half of its bits is searched for.
__device__ uint32_t bound_of_largest(BestKeysShared& shared, const uint32_t* values, int n, int wanted) {
  BlockCounter counter(shared);
  __syncthreads();
  uint32_t bound = 0;
  for (uint32_t bit = 1u << 31; bit >= 1u << 16; bit >>= 1) {
    unsigned reach = 0;
    for (int i = threadIdx.x; i < n; i += kRowThreads) reach += values[i] >= (bound | bit);
    if (counter.sum(reach) >= wanted) bound |= bit;
  }
  __syncthreads();
  return bound;
}

// Tokens first + [0, kUnit) that reach the floor, may follow and have no edit, a bit for each.
template <class T>
__device__ uint32_t find_candidates(const Row<T>& row, int first, RowCutoff floor) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const int id = first + i;
    if (id < row.vocab && floor.keeps(widen(row.logits[id]), id)) found |= 1u << i;
  }
  if (row.num_edits == 0 && row.allowed == nullptr) return found;
  for (uint32_t left = found; left != 0; left &= left - 1) {
    const int id = first + __ffs(static_cast<int>(left)) - 1;
    if (!row.allows(id) || row.find_edit(id) >= 0) found &= ~(left & -left);
  }
  return found;
}

// The tokens without an edit, from the sets that hold the best of them. Edited tokens may be among the maxima
// but are not among what is offered, so that as many more are asked for.
template <class T>
__device__ void offer_best_sets(const Row<T>& row, BestKeysShared& shared, BestKeys& best, uint32_t* maxima,
                                int k) {
  const int sets = num_sets<T>(row.vocab);
  const uint32_t bound = bound_of_largest(shared, maxima, sets, k + row.num_edits);
  best.raise_floor(uint64_t{bound} << 32);
  const uint32_t reached = max(bound, ordered(-FLT_MAX));
  uint32_t* list = maxima;
  compress(
      shared, list, sets, [&](uint32_t most) { return most >= reached; }, [](int i, uint32_t) { return i; });
  const int units = static_cast<int>(shared.count) * Tile<T>::kUnits;
  __syncthreads();
  best.clear();
  for (int base = 0; base < units; base += kRowThreads) {
    const int unit = base + static_cast<int>(threadIdx.x);
    const int set = unit < units ? static_cast<int>(list[unit / Tile<T>::kUnits]) : 0;
    const int thread = set % kRowThreads;
    const int first =
        set / kRowThreads * Tile<T>::kStep + (unit % Tile<T>::kUnits * kRowThreads + thread) * kUnit;
    const uint32_t pending = unit < units ? find_candidates(row, first, best.floor()) : 0;
    best.offer(pending, [&](int i) { return ranked(widen(row.logits[first + i]), first + i); });
  }
}

// An element of an array in registers.
template <int N>
__device__ __forceinline__ uint64_t pick(const uint64_t (&from)[N], int index) {
  uint64_t picked = from[0];
#pragma unroll
  for (int i = 1; i < N; ++i) picked = i == index ? from[i] : picked;
  return picked;
}

// Tokens token_of(i), i in [0, count), each with its edit.
template <class T, class TokenOf>
__device__ void offer_tokens(const Row<T>& row, BestKeys& best, int count, TokenOf&& token_of) {
  for (int base = 0; base < count; base += kRowThreads * kEach) {
    uint64_t keys[kEach];
    uint32_t pending = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = base + i * kRowThreads + static_cast<int>(threadIdx.x);
      const int token = at < count ? token_of(at) : -1;
      const float value = token >= 0 ? row.edited(token) : -INFINITY;
      keys[i] = ranked(value, token);
      if (best.floor().keeps(value, token)) pending |= 1u << i;
    }
    best.offer(pending, [&](int i) { return pick(keys, i); });
  }
}

template <class T>
__device__ void offer_children(const Row<T>& row, BestKeys& best, int node) {
  const CatalogueRule rule = row.group->rule;
  const CatalogueView& tree = rule.tree;
  if (!tree.contains(node)) return;
  const int begin = tree.begin(node);
  offer_tokens(row, best, tree.end(node) - begin, [&](int i) { return tree.tokens[begin + i]; });
  if (!tree.is_terminal(node)) return;
  offer_tokens(row, best, rule.num_ends,
               [&](int i) { return tree.child(node, rule.end_tokens[i]) < 0 ? rule.end_tokens[i] : -1; });
}

// The group that a row belongs to; -1: none.
__device__ int find_group(const BeamCandidateParams& p, int row, int& shared) {
  if (threadIdx.x == 0) shared = -1;
  __syncthreads();
  for (int g = threadIdx.x; g < p.num_groups; g += kRowThreads)
    if (p.group_start[g] <= row && row < p.group_start[g + 1]) shared = g;
  __syncthreads();
  return shared;
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, 2) row_kernel(const BeamCandidateParams p, int capacity) {
  extern __shared__ uint64_t keys[];
  __shared__ BestKeysShared shared;
  __shared__ int group_shared;
  const int r = blockIdx.x;
  const bool aligned = p.stride % kVectorWidth<T> == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
  Row<T> row{static_cast<const T*>(p.logits) + r * p.stride, aligned, static_cast<int>(p.vocab_size)};
  Tile<T> first;
  first.load(row, 0);  // on its way while the group is looked up
  const int g = find_group(p, r, group_shared);
  const BeamGroup* group = g >= 0 ? p.groups + g : nullptr;
  const int k = group != nullptr ? group->k : 0;
  if (k == 0) {
    if (threadIdx.x == 0) p.out.bad[r] = false;
    return;
  }
  row.group = group;
  row.num_edits = group->num_edits;
  row.allowed = group->allowed;
  const bool in_catalogue = group->rule.restricts();
  auto* maxima = reinterpret_cast<uint32_t*>(keys + capacity);  // [sets]
  const RunningSum mine = stream(row, first, in_catalogue ? nullptr : maxima + threadIdx.x);
  const double log_sum = all_log_sum(mine, shared);
  const float cumulative = p.cumulative[r];
  const bool bad = log_sum != log_sum || cumulative != cumulative;
  const Workspace workspace(p.workspace, p.num_rows);
  if (bad) {
    if (threadIdx.x == 0) {
      p.out.bad[r] = true;
      workspace.rows[r].count = 0;
    }
    return;
  }
  BestKeys best(shared, keys, capacity, k);
  if (in_catalogue) {
    offer_children(row, best, p.nodes[r]);
  } else {
    offer_best_sets(row, shared, best, maxima, k);
    offer_tokens(row, best, row.num_edits, [&](int i) { return group->edit_ids[i]; });
  }
  const int count = best.finish();
  uint64_t* to = workspace.keys + group->first_slot + int64_t{r - p.group_start[g]} * k;
  for (int i = threadIdx.x; i < count; i += kRowThreads) to[i] = keys[i];
  if (threadIdx.x == 0) {
    p.out.bad[r] = false;
    workspace.rows[r] = {log_sum, count, 0};
  }
}

// --- rows of a group meet
// -----------------------------------------------------------------------------------------------------

struct Group {
  const RowResult* rows;  // [num_rows]
  const uint64_t* keys;   // [num_rows, k]
  const float* cumulative;
  int num_rows;
  int k;

  // -inf where the row has no such candidate.
  __device__ float score(int row, int rank) const {
    const RowResult result = rows[row];
    if (rank >= result.count) return -INFINITY;
    const float value = ranked_value(keys[int64_t{row} * k + rank]);
    return __fadd_rn(cumulative[row], static_cast<float>(value - result.log_sum));
  }
};

// A value that at least `wanted` of the threads' own reach, and hardly more; 0 if there are fewer.
__device__ uint32_t bound_of_maxima(uint32_t mine, int wanted) {
  uint32_t bound = 0;
  for (uint32_t bit = 1u << 31; bit >= 1u << 16; bit >>= 1)
    if (__syncthreads_count(mine >= (bound | bit)) >= wanted) bound |= bit;
  return bound;
}

// Rows' candidates column by column, each row's best first, until no row has one that reaches the floor:
// those behind it do not either.
__device__ void offer_rows(const Group& group, BestKeys& best) {
  static_assert(kEach * kRowThreads >= kMaxBeamRows);
  const int columns = kEach * kRowThreads / group.num_rows;
  for (int column = 0; column < group.k; column += columns) {
    uint64_t keys[kEach];
    uint64_t most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * kRowThreads + static_cast<int>(threadIdx.x);
      const int row = at % group.num_rows;
      const int rank = column + at / group.num_rows;
      const bool exists = at < columns * group.num_rows && rank < group.k;
      keys[i] = ranked(exists ? group.score(row, rank) : -INFINITY, row * group.k + rank);
      most = max(most, keys[i]);
    }
    if (column == 0 && group.k <= kRowThreads / 2)
      best.raise_floor(uint64_t{bound_of_maxima(static_cast<uint32_t>(most >> 32), group.k)} << 32);
    uint32_t pending = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (best.reaches(keys[i])) pending |= 1u << i;
    if (!__syncthreads_or(pending != 0)) return;
    best.offer(pending, [&](int i) { return pick(keys, i); });
  }
}

template <class T>
__global__ void __launch_bounds__(kRowThreads) group_kernel(const BeamCandidateParams p, int capacity) {
  extern __shared__ uint64_t keys[];
  __shared__ BestKeysShared shared;
  const int64_t g = blockIdx.x;
  const int begin = p.group_start[g];
  const int k = p.groups[g].k;
  const Workspace workspace(p.workspace, p.num_rows);
  const Group group{workspace.rows + begin, workspace.keys + p.groups[g].first_slot, p.cumulative + begin,
                    min(p.group_start[g + 1] - begin, static_cast<int>(kMaxBeamRows)), k};
  int count = 0;
  if (k > 0 && group.num_rows > 0) {
    BestKeys best(shared, keys, capacity, k);
    offer_rows(group, best);
    count = best.finish();
  }
  const auto* logits = static_cast<const T*>(p.logits);
  for (int64_t i = threadIdx.x; i < p.out.columns; i += kRowThreads) {
    const int64_t at = g * p.out.columns + i;
    const bool exists = i < count;
    const int candidate = exists ? ranked_id(keys[i]) : 0;
    const int row = exists ? candidate / k : -1;
    const int token = exists ? ranked_id(group.keys[candidate]) : -1;
    p.out.score[at] = exists ? ranked_value(keys[i]) : -INFINITY;
    p.out.row[at] = row;
    p.out.token[at] = token;
    p.out.logprob[at] =
        exists ? static_cast<float>(widen(logits[(begin + row) * p.stride + token]) - group.rows[row].log_sum)
               : -INFINITY;
  }
}

// Room for several times k, so that a row is seldom cut back; as much as lets three CTAs share a
// multiprocessor.
int capacity_for(int64_t k) {
  int capacity = 1024;
  while (capacity < 4 * k && capacity < 2 * kMaxBeamCandidates) capacity *= 2;
  return capacity;
}

}  // namespace

int64_t beam_workspace_bytes(int64_t num_rows, int64_t num_slots) {
  return num_rows * static_cast<int64_t>(sizeof(RowResult)) +
         num_slots * static_cast<int64_t>(sizeof(uint64_t));
}

void beam_candidates(const BeamCandidateParams& p, Stream stream) {
  check(p.vocab_size >= 1 && p.vocab_size <= kMaxVocab, "beam_candidates: vocabulary outside [1, 416000]");
  check(p.stride >= p.vocab_size || p.num_rows <= 1, "beam_candidates: rows overlap");
  check(p.out.columns >= 1 && p.out.columns <= kMaxBeamCandidates, "beam_candidates: columns out of range");
  check(is_aligned(p.workspace, alignof(RowResult)), "beam_candidates: the workspace is not aligned");
  const int capacity = capacity_for(p.out.columns);
  const size_t key_bytes = capacity * sizeof(uint64_t);
  const auto rows = static_cast<unsigned>(p.num_rows);
  const auto groups = static_cast<unsigned>(p.num_groups);
  dispatch(p.dtype, [&]<class T>() {
    const size_t set_bytes = num_sets<T>(p.vocab_size) * sizeof(uint32_t);
    launch(row_kernel<T>, {rows, kRowThreads, key_bytes + set_bytes}, stream, p, capacity);
    launch(group_kernel<T>, {groups, kRowThreads, key_bytes}, stream, p, capacity);
  });
}

}  // namespace bequest::cuda
