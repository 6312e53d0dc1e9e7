// One item of paged attention: a query tile and a kv head, over a range of splits.
//
// Each tile of kKeyTile keys is packed once, keys transposed, and then used by all rows of the tile (query
// tokens × heads of the group) in register tiles: scores = q · Kᵀ, weights by online softmax, o += weights ·
// V. A lane is a key in the first product and a value element in the second, so neither has a horizontal sum.
// With few rows (decode) a packed tile would be used once: there the keys are transposed in registers on
// their way into the product, and the values are read where they lie. On NEON a lane of that product may be a
// query instead (neon_products.h).
//
// Masked keys have weight exactly 0, and skipping a tile that a row does not see leaves the row's bits alone;
// so a row's result is a function of its own q, keys and values.
#include "attention/cpu/attend.h"

#include "attention/cpu/key_rows.h"
#include "attention/cpu/split_walk.h"
#include "attention/cpu/tile_kernels.h"

namespace bequest::BEQUEST_ISA {
namespace {

void gather_queries(const PagedAttentionParams& p, const AttendJob& job, float* q) {
  const int64_t row = int64_t{job.shape->group()} * job.shape->head_dim;
  for (int t = 0; t < job.tile->num_tokens; ++t) {
    const float* from = p.q + (job.tile->first_token + t) * p.q_stride + job.head * row;
    for (int64_t i = 0; i < row; ++i) q[t * row + i] = from[i] * p.scale;
  }
}

// keys[D, kKeyTile] = rowsᵀ
template <class T>
void pack_keys(const KeyRows<T>& rows, const KeyRows<T>& next, KeyRange used, int dim, float* keys) {
  for (int j = used.begin / kLanes * kLanes; j < used.end; j += kLanes) {
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      VecF square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        square[i] = load(rows.at[j + i] + d);
        fetch_ahead(next.at[j + i], d);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(keys + (d + i) * kKeyTile + j, square[i]);
    }
    for (; d < dim; ++d)
      for (int i = 0; i < kLanes; ++i) keys[d * kKeyTile + j + i] = to_float(rows.at[j + i][d]);
  }
}

// values[kKeyTile, padded_dim], zero beyond D
template <class T>
void pack_values(const KeyRows<T>& rows, const KeyRows<T>& next, KeyRange used, int64_t values_after_keys,
                 int dim, int padded_dim, float* values) {
  for (int j = used.begin; j < used.end; ++j) {
    const T* from = rows.at[j] + values_after_keys;
    float* to = values + j * padded_dim;
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      store(to + d, load(from + d));
      fetch_ahead(next.at[j] + values_after_keys, d);
    }
    for (; d < dim; ++d) to[d] = to_float(from[d]);
    for (; d < padded_dim; ++d) to[d] = 0.0f;
  }
}

// Rows that attend without packing: their sums share the registers with a square of keys.
#if defined(BEQUEST_ISA_avx2)
constexpr int kFewRows = 4;
#else
constexpr int kFewRows = 8;
#endif

#if !defined(BEQUEST_ISA_neon)  // neon_products.h, neon_weights.h

// scores[R, kKeyTile] = q[R, D] · rowsᵀ for the vectors of keys in `computed`. REQUIRES: kLanes divides D.
template <int R, class T>
void score_few(const float* q, const KeyRows<T>& rows, const KeyRows<T>& next, KeyRange computed, int dim,
               float* scores) {
  for (int j = computed.begin; j < computed.end; j += kLanes) {
    VecF sum[R] = {};
    for (int d = 0; d < dim; d += kLanes) {
      VecF square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        square[i] = load(rows.at[j + i] + d);
        fetch_ahead(next.at[j + i] + d);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i)
        for (int r = 0; r < R; ++r) sum[r] += broadcast(q[r * dim + d + i]) * square[i];
    }
    for (int r = 0; r < R; ++r) store(scores + r * kKeyTile + j, sum[r]);
  }
}

#endif

// The largest score of a row in `computed` (relative, whole vectors), those outside `seen` made -inf.
inline float mask_scores(float* scores, KeyRange computed, KeyRange seen, float cap) {
  VecI lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const bool masked = seen.begin > computed.begin || seen.end < computed.end;
#if defined(BEQUEST_ISA_neon)
  if (!masked && !(cap > 0)) return largest_score(scores, computed);
#endif
  VecF best = broadcast(-__builtin_inff());
  for (int j = computed.begin; j < computed.end; j += kLanes) {
    VecF s = load(scores + j);
    if (cap > 0) s = soft_cap(s, cap);
    if (masked) {
      const VecI key = lane + j;
      s = (key >= seen.begin) & (key < seen.end) ? s : broadcast(-__builtin_inff());
    }
    if (masked || cap > 0) store(scores + j, s);
    best = max(best, s);
  }
  return largest_lane(best);
}

// scores[j] += table[clamp(offset + j, 0, last)] for the vectors of `computed`.
void add_bias(float* scores, KeyRange computed, const float* table, int offset, int last) {
  for (int j = computed.begin; j < computed.end; j += kLanes)
    store(scores + j, load(scores + j) + bias_from(table, offset + j, last));
}

// a > b ? a : b, as one instruction.
inline float larger(float a, float b) {
#if defined(__x86_64__)
  return _mm_cvtss_f32(_mm_max_ss(_mm_set_ss(a), _mm_set_ss(b)));
#else
  return a > b ? a : b;
#endif
}

// Running maxima and sums of some rows, in one split.
struct RunningRows {
  float* m;       // [rows]
  float* lane_d;  // [rows, kLanes]
};

// Turns scores [rows, kKeyTile] of `computed` into weights, 0 outside what each row has `seen`, and moves the
// rows to their new maxima; shrink [rows] is what their earlier weights are to be multiplied by. No branch
// asks whether a maximum grew, which nobody could predict, and the factors, written one by one, are read as
// vectors only after the weights: the chip would wait for the writes. One copy of the code, so that all rows
// round alike.
__attribute__((noinline)) void weigh(float* scores, int rows, KeyRange computed, const KeyRange* seen,
                                     float cap, RunningRows state, float* shrink) {
  for (int r = 0; r < rows; ++r) {
    const float before = state.m[r];
    const bool sees = seen[r].begin < seen[r].end;
    const float tile_max = sees ? mask_scores(scores + r * kKeyTile, computed, seen[r], cap) : before;
    const float m = larger(tile_max, before);
    shrink[r] = before - m;
    state.m[r] = m;
  }
  VecF sums[kScoredRows];
  for (int r = 0; r < rows; ++r, scores += kKeyTile) {
    sums[r] = VecF{};
    if (seen[r].begin >= seen[r].end) {
      for (int j = computed.begin; j < computed.end; j += kLanes) store(scores + j, VecF{});
      continue;
    }
#if defined(BEQUEST_ISA_neon)
    sums[r] = weigh_row(scores, computed, state.m[r]);
#else
    const VecF m = broadcast(state.m[r]);
#pragma GCC unroll 4
    for (int j = computed.begin; j < computed.end; j += kLanes) {
      const VecF weight = exp_nonpositive(load(scores + j) - m);
      store(scores + j, weight);
      sums[r] += weight;
    }
#endif
  }
  for (int r = 0; r < rows; r += kLanes) {
    const VecF fall = load(shrink + r);
    store(shrink + r, exp_nonpositive(fall == fall ? fall : VecF{}));  // NaN: -inf to -inf, nothing seen yet
  }
  for (int r = 0; r < rows; ++r) {
    float* d = state.lane_d + r * kLanes;
    store(d, load(d) * shrink[r] + sums[r]);
  }
}

constexpr int kShrinks = (kScoredRows + kLanes - 1) / kLanes * kLanes;  // whole vectors

class TileAttention {
 public:
  TileAttention(const PagedAttentionParams& p, const AttendJob& job, float* scratch)
      : p_(p),
        job_(job),
        dim_(job.shape->head_dim),
        padded_dim_(job.padded_dim),
        group_(job.shape->group()),
        rows_(job.num_rows()),
        scratch_(scratch, rows_, dim_, padded_dim_) {}

  void gather() {
    gather_queries(p_, job_, scratch_.q);
#if defined(BEQUEST_ISA_neon)
    if (rows_ <= kFewRows) queries_as_lanes(scratch_.q, rows_, dim_, query_lanes());
#endif
  }

  // Leaves the state of one split in `state`.
  template <class T>
  void attend_split(int split, StateRows state) {
    clear(state);
    const bool few = rows_ <= kFewRows && dim_ == padded_dim_;
    const KeyRange wanted =
        intersect({job_.tile->key_begin, job_.tile->key_end}, {split * kSplit, (split + 1) * kSplit});
    const int first = wanted.begin / kKeyTile * kKeyTile;
    KeyRows<T> rows[2];
    rows[0].find(p_, job_, first, keys_from(first));
    for (int begin = first, turn = 0; begin < wanted.end; begin += kKeyTile, turn ^= 1) {
      // Past the split too: its keys are the next to be read, by this item or by another.
      const int after = begin + kKeyTile < job_.tile->key_end ? begin + kKeyTile : begin;
      rows[turn ^ 1].find(p_, job_, after, keys_from(after));
      if (few)
        attend_unpacked(rows[turn], rows[turn ^ 1], begin, state);
      else
        attend_packed(rows[turn], rows[turn ^ 1], begin, state);
    }
    for (int row = 0; row < rows_; ++row) state.d[row] = reduce_add(load(scratch_.lane_d + row * kLanes));
  }

  StateRows total() const { return StateRows(scratch_.total, rows_, padded_dim_); }
  StateRows split_state() const { return StateRows(scratch_.split, rows_, padded_dim_); }

 private:
#if defined(BEQUEST_ISA_neon)
  float* query_lanes() const { return scratch_.keys; }  // few rows pack no keys
#endif

  // Keys of the tile at tile_begin that some row sees.
  KeyRange keys_from(int tile_begin) const {
    return intersect({job_.tile->key_begin, job_.tile->key_end}, {tile_begin, tile_begin + kKeyTile});
  }

  void clear(StateRows state) {
    clear_states(job_, state);
    for (int64_t i = 0; i < int64_t{rows_} * kLanes; ++i) scratch_.lane_d[i] = 0.0f;
  }

  // What rows [first, first + count) see of the tile at tile_begin, relative to it.
  struct View {
    KeyRange seen[kScoredRows];
    KeyRange any;       // seen by one of them
    KeyRange computed;  // the whole vectors around it
  };

  View view(int first, int count, int tile_begin) const {
    View v;
    v.any = {kKeyTile, 0};
    int token = first / group_, head = first % group_;
    for (int r = 0; r < count; ++r, ++head) {
      if (r > 0 && head < group_) {  // the heads of a token see alike
        v.seen[r] = v.seen[r - 1];
        continue;
      }
      if (head == group_) ++token, head = 0;
      const KeyRange keys = visible(job_, token);
      const KeyRange seen = intersect({keys.begin - tile_begin, keys.end - tile_begin}, {0, kKeyTile});
      v.seen[r] = seen;
      if (seen.begin >= seen.end) continue;
      v.any.begin = v.any.begin < seen.begin ? v.any.begin : seen.begin;
      v.any.end = v.any.end > seen.end ? v.any.end : seen.end;
    }
    v.computed = {v.any.begin / kLanes * kLanes, (v.any.end + kLanes - 1) / kLanes * kLanes};
    return v;
  }

  void weigh_rows(const View& v, int first, int count, int tile_begin, StateRows state, float* shrink) {
    if (p_.bias != nullptr) add_bias_rows(v, first, count, tile_begin);
    weigh(scratch_.scores, count, v.computed, v.seen, p_.soft_cap,
          {state.m + first, scratch_.lane_d + int64_t{first} * kLanes}, shrink);
  }

  void add_bias_rows(const View& v, int first, int count, int tile_begin) {
    const int reach = static_cast<int>(p_.bias_reach);
    for (int r = 0; r < count; ++r) {
      const int head = job_.head * group_ + (first + r) % group_;
      const int position = job_.tile->first_position + (first + r) / group_;
      add_bias(scratch_.scores + r * kKeyTile, v.computed, p_.bias + int64_t{head} * (2 * reach + 1),
               tile_begin - position + reach, 2 * reach);
    }
  }

  template <class T>
  void attend_unpacked(const KeyRows<T>& rows, const KeyRows<T>& next, int tile_begin, StateRows state) {
    const View v = view(0, rows_, tile_begin);
    const int64_t values = p_.layout.values_after_keys();
    with_rows<kFewRows>(rows_, [&]<int R>() {
#if defined(BEQUEST_ISA_neon)
      score_few<R>(scratch_.q, query_lanes(), rows, next, v.computed, dim_, scratch_.scores);
      float shrink[kShrinks];
      weigh_rows(v, 0, R, tile_begin, state, shrink);
      const StreamedRows<T> streamed{rows.at + v.any.begin, next.at + v.any.begin, values};
      multiply<R>(ToShrunk{shrink}, scratch_.scores + v.any.begin, kKeyTile, streamed, state.o, padded_dim_,
                  v.any.end - v.any.begin, padded_dim_ / kLanes);
#else
      score_few<R>(scratch_.q, rows, next, v.computed, dim_, scratch_.scores);
      float shrink[kShrinks];
      weigh_rows(v, 0, R, tile_begin, state, shrink);
      for (int j = v.any.begin; j < v.any.end; ++j)
        for (int d = 0; d < dim_; d += kLanes) fetch_ahead(next.at[j] + values + d);
      multiply<R>(ToShrunk{shrink}, scratch_.scores + v.any.begin, kKeyTile,
                  ScatteredRows<T>{rows.at + v.any.begin, values}, state.o, padded_dim_,
                  v.any.end - v.any.begin, padded_dim_ / kLanes);
#endif
    });
  }

  template <class T>
  void attend_packed(const KeyRows<T>& rows, const KeyRows<T>& next, int tile_begin, StateRows state) {
    const KeyRange keys = keys_from(tile_begin);
    const KeyRange used = {keys.begin - tile_begin, keys.end - tile_begin};
    pack_keys(rows, next, used, dim_, scratch_.keys);
    pack_values(rows, next, used, p_.layout.values_after_keys(), dim_, padded_dim_, scratch_.values);
    for (int first = 0; first < rows_; first += kScoredRows)
      attend_rows(first, rows_ - first < kScoredRows ? rows_ - first : kScoredRows, tile_begin, state);
  }

  // Rows [first, first + count) against the packed tile. Weighing is a chain of short steps and ends in a
  // wait, so it is done for more rows at a time than a register tile has.
  void attend_rows(int first, int count, int tile_begin, StateRows state) {
    const View v = view(first, count, tile_begin);
    if (v.any.begin >= v.any.end) return;
    in_blocks(count, [&]<int R>(int row) {
      multiply<R>(ToZero{}, scratch_.q + int64_t{first + row} * dim_, dim_,
                  DenseRows{scratch_.keys + v.computed.begin, kKeyTile},
                  scratch_.scores + row * kKeyTile + v.computed.begin, kKeyTile, dim_,
                  (v.computed.end - v.computed.begin) / kLanes);
    });
    float shrink[kShrinks];
    weigh_rows(v, first, count, tile_begin, state, shrink);
    in_blocks(count, [&]<int R>(int row) {
      multiply<R>(ToShrunk{shrink + row}, scratch_.scores + row * kKeyTile + v.any.begin, kKeyTile,
                  DenseRows{scratch_.values + int64_t{v.any.begin} * padded_dim_, padded_dim_},
                  state.o + int64_t{first + row} * padded_dim_, padded_dim_, v.any.end - v.any.begin,
                  padded_dim_ / kLanes);
    });
  }

  const PagedAttentionParams& p_;
  const AttendJob& job_;
  const int dim_;
  const int padded_dim_;
  const int group_;
  const int rows_;
  const AttentionScratch scratch_;
};

}  // namespace

void attend(const PagedAttentionParams& p, const AttendJob& job, int split_begin, int split_end,
            float* scratch, float* partials) {
  TileAttention tile(p, job, scratch);
  tile.gather();
  with_cache_type(p.kv_dtype, [&]<class T>() {
    walk_splits(p, job, tile, split_begin, split_end, partials,
                [&](int split, StateRows state) { tile.attend_split<T>(split, state); });
  });
}

}  // namespace bequest::BEQUEST_ISA
