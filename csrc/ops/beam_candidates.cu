// A CTA per row, then a CTA per group. A row's logits stream through registers once: the sum of the softmax
// is kept up with a running maximum, and tokens that may be among the row's k best go to shared memory.
// Within a row the normaliser changes no order, so that it is needed only when rows meet. One CTA per row,
// however many rows there are: the order of additions, and so a row's scores, do not depend on the batch.
#include <algorithm>

#include "ops/beam_candidates_cuda.h"
#include "ops/best_keys.cuh"

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
  const BeamGroup* group;
  int num_edits;
  const uint32_t* allowed;

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
  static constexpr int kSize = kUnits * kUnit;  // a bit for each in a word
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
    detail::unpack<T, kWide>(raw_[i / kWide], x);
    return x[i % kWide];
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
  using Vector = detail::Packed<T, kWide>;
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

// A value that at least `wanted` of the threads' maxima reach, and hardly more: with one token of each thread
// at or above it, a lower bound of the row's wanted-th best. Only the upper half of its bits is searched for.
__device__ uint32_t bound_of_maxima(float most, int wanted) {
  const uint32_t mine = ordered(most);
  uint32_t bound = 0;
  for (uint32_t bit = 1u << 31; bit >= 1u << 16; bit >>= 1)
    if (__syncthreads_count(mine >= (bound | bit)) >= wanted) bound |= bit;
  return bound;
}

// The tile's tokens that reach the floor, may follow and have no edit, a bit for each.
template <class T>
__device__ __forceinline__ uint32_t find_candidates(const Row<T>& row, const Tile<T>& x, int base,
                                                    RowCutoff floor) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < Tile<T>::kSize; ++i)
    if (floor.keeps(x[i], Tile<T>::id(base, i))) found |= 1u << i;
  if (row.num_edits > 0 || row.allowed != nullptr) {
    for (uint32_t left = found; left != 0; left &= left - 1) {
      const int id = Tile<T>::id(base, __ffs(static_cast<int>(left)) - 1);
      if (!row.allows(id) || row.find_edit(id) >= 0) found &= ~(left & -left);
    }
  }
  return found;
}

// All tokens that have no edit: into the sum and, with `offers`, to the best.
template <class T>
__device__ RunningSum stream(const Row<T>& row, BestKeys& best, bool offers, int k) {
  RunningSum sum;
  Tile<T> next;
  next.load(row, 0);
  for (int base = 0; base < row.vocab; base += Tile<T>::kStep) {
    const Tile<T> x = next;
    if (base + Tile<T>::kStep < row.vocab) next.load(row, base + Tile<T>::kStep);
    const float most = x.max();
    sum.add(x, most);
    if (!offers) continue;
    // Edited tokens are not to be counted, so that as many more are asked for; of masked ones there may be
    // any number.
    if (base == 0 && row.allowed == nullptr && k + row.num_edits <= kRowThreads / 2)
      best.raise_floor(uint64_t{bound_of_maxima(most, k + row.num_edits)} << 32);
    const RowCutoff floor = best.floor();
    const uint32_t pending = most >= floor.value ? find_candidates(row, x, base, floor) : 0;
    best.offer(pending, [&](int i) {
      const int id = Tile<T>::id(base, i);
      return ranked(widen(row.logits[id]), id);
    });
  }
  return sum;
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
  const int g = find_group(p, r, group_shared);
  const BeamGroup* group = g >= 0 ? p.groups + g : nullptr;
  const int k = group != nullptr ? group->k : 0;
  if (k == 0) {
    if (threadIdx.x == 0) p.out.bad[r] = false;
    return;
  }
  const bool aligned = p.stride % kVectorWidth<T> == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
  const Row<T> row{static_cast<const T*>(p.logits) + r * p.stride,
                   aligned,
                   static_cast<int>(p.vocab_size),
                   group,
                   group->num_edits,
                   group->allowed};
  const bool in_catalogue = group->rule.restricts();
  BestKeys best(shared, keys, capacity, k);
  const RunningSum mine = stream(row, best, !in_catalogue, k);
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
  if (in_catalogue)
    offer_children(row, best, p.nodes[r]);
  else
    offer_tokens(row, best, row.num_edits, [&](int i) { return group->edit_ids[i]; });
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

// Rows' candidates column by column, each row's best first, until no row has one that reaches the floor:
// those behind it do not either.
__device__ void offer_rows(const Group& group, BestKeys& best) {
  static_assert(kEach * kRowThreads >= kMaxBeamRows);
  const int columns = kEach * kRowThreads / group.num_rows;
  for (int column = 0; column < group.k; column += columns) {
    uint64_t keys[kEach];
    uint32_t pending = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * kRowThreads + static_cast<int>(threadIdx.x);
      const int row = at % group.num_rows;
      const int rank = column + at / group.num_rows;
      const bool exists = at < columns * group.num_rows && rank < group.k;
      const float score = exists ? group.score(row, rank) : -INFINITY;
      const int candidate = row * group.k + rank;
      keys[i] = ranked(score, candidate);
      if (best.floor().keeps(score, candidate)) pending |= 1u << i;
    }
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
  check(p.vocab_size >= 1 && p.vocab_size < INT_MAX / 2, "beam_candidates: vocabulary out of range");
  check(p.stride >= p.vocab_size || p.num_rows <= 1, "beam_candidates: rows overlap");
  check(p.out.columns >= 1 && p.out.columns <= kMaxBeamCandidates, "beam_candidates: columns out of range");
  check(is_aligned(p.workspace, alignof(RowResult)), "beam_candidates: the workspace is not aligned");
  const int capacity = capacity_for(p.out.columns);
  const size_t shared_bytes = capacity * sizeof(uint64_t);
  dispatch(p.dtype, [&]<class T>() {
    launch(row_kernel<T>, {static_cast<unsigned>(p.num_rows), kRowThreads, shared_bytes}, stream, p,
           capacity);
    launch(group_kernel<T>, {static_cast<unsigned>(p.num_groups), kRowThreads, shared_bytes}, stream, p,
           capacity);
  });
}

}  // namespace bequest::cuda
