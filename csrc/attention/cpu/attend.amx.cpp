// One item of paged attention by matrix units: a query tile and a kv head, over a range of splits, in
// products of bfloat16 with sums in float32.
//
// The keys and values of a split are packed once for all rows of the tile. Then 32 rows at a time: scores of
// the whole split, their maxima, weights, and the product of the weights with the values. A split is short
// enough for its scores to stay in L2, so nothing is ever rescaled; splits merge as everywhere.
//
// Weights are rounded to bfloat16 before they are summed, so that they add up to one whatever the rounding.
// Scores, maxima and sums of a row involve its own q alone and walk the keys from the split's beginning in
// the same steps, and a masked key has weight exactly 0; so a row's bits do not depend on the other rows.
#include "attention/cpu/attend.h"

#include "attention/cpu/amx_products.h"
#include "attention/cpu/split_walk.h"

namespace bequest::amx {
namespace {

constexpr float kLog2E = 1.44269504f;

// Rows [first, first + kAmxRows) of a tile in one split. Those beyond the last see what the last one sees.
struct RowBlock {
  int first;
  int num_rows;                 // of the tile's
  const float* bias[kAmxRows];  // of the row's head, if there are some
  int bias_from[kAmxRows];      // where the split's first key has its own among them
  KeyRange seen[kAmxRows];      // relative to the split
  KeyRange all[2];              // seen by every row of each half
  KeyRange steps;               // of 32 keys, around what any row sees
};

// Running maxima of a row's lanes.
struct Maxima {
  VecF of[kAmxRows];

  Maxima() {
    for (VecF& row : of) row = broadcast(-__builtin_inff());
  }
};

// What a thread reads when it has attended a split, as far as it knows.
struct NextSplit {
  int head;
  int split;
};

class AmxAttention {
 public:
  AmxAttention(const PagedAttentionParams& p, const AttendJob& job, float* scratch)
      : p_(p),
        job_(job),
        dim_(job.shape->head_dim),
        tiled_dim_(static_cast<int>(AmxScratch::tiled_dim(dim_))),
        group_(job.shape->group()),
        rows_(job.num_rows()),
        scratch_(scratch, rows_, dim_, job.padded_dim) {}

  void gather() {
    for (int first = 0; first < rows_; first += 16)
      for (int d = 0; d < tiled_dim_; d += 32) {
        __m512i rows[kLanes];
        for (int i = 0; i < kLanes; ++i)
          rows[i] = first + i < rows_ ? load_depth(query(first + i), d, dim_) : _mm512_setzero_si512();
        BFloat16* tile = scratch_.q + (int64_t{first} * tiled_dim_ + d * 16);
        if (is_few())
          store_columns(rows, tile);
        else
          store_rows(rows, tile);
      }
  }

  // Leaves the state of one split in `state`.
  // `next` is the split that this thread attends after it.
  template <class T>
  void attend_split(int split, NextSplit next, StateRows state) {
    const int begin = split * kSplit;
    if (is_few()) return attend_few<T>(block_at(0, begin), begin, next, state);
    pack<T>(begin);
    for (int first = 0; first < rows_; first += kAmxRows) {
      const RowBlock block = block_at(first, begin);
      if (block.num_rows <= 16)
        attend_rows<1>(block, state);
      else
        attend_rows<2>(block, state);
    }
  }

  bool is_few() const { return rows_ <= kFewRows && dim_ == job_.padded_dim; }
  StateRows total() const { return StateRows(scratch_.total, rows_, job_.padded_dim); }
  StateRows split_state() const { return StateRows(scratch_.split, rows_, job_.padded_dim); }

 private:
  const float* query(int row) const {
    return p_.q + (job_.tile->first_token + row / group_) * p_.q_stride +
           (int64_t{job_.head} * group_ + row % group_) * dim_;
  }

  KeyRange keys_of(int split_begin) const {
    return intersect({job_.tile->key_begin, job_.tile->key_end}, {split_begin, split_begin + kSplit});
  }

  template <class T>
  void pack(int split_begin) {
    const KeyRange wanted = keys_of(split_begin);
    for (int begin = wanted.begin / kKeyTile * kKeyTile; begin < wanted.end; begin += kKeyTile) {
      KeyRows<T> rows;
      rows.find(p_, job_, begin, intersect(wanted, {begin, begin + kKeyTile}));
      const int64_t at = int64_t{begin - split_begin} * tiled_dim_;
      pack_keys(rows, dim_, scratch_.keys + at);
      pack_values(rows, p_.layout.values_after_keys(), dim_, scratch_.values + at);
    }
  }

  RowBlock block_at(int first, int split_begin) const {
    RowBlock block;
    block.first = first;
    block.num_rows = rows_ - first < kAmxRows ? rows_ - first : kAmxRows;
    KeyRange any = {kSplit, 0};
    int token = first / group_, head = first % group_;
    for (int r = 0; r < kAmxRows; ++r) {
      const KeyRange keys = visible(job_, token);
      const KeyRange seen = intersect({keys.begin - split_begin, keys.end - split_begin}, {0, kSplit});
      block.seen[r] = seen;
      if (p_.bias != nullptr) {
        block.bias[r] = p_.bias + (int64_t{job_.head} * group_ + head) * (2 * p_.bias_reach + 1);
        block.bias_from[r] =
            split_begin - job_.tile->first_position - token + static_cast<int>(p_.bias_reach);
      }
      if (first + r + 1 < rows_ && ++head == group_) ++token, head = 0;
      block.all[r / 16] = r % 16 == 0 ? seen : intersect(block.all[r / 16], seen);
      if (seen.begin >= seen.end) continue;
      any = {any.begin < seen.begin ? any.begin : seen.begin, any.end > seen.end ? any.end : seen.end};
    }
    block.steps = {any.begin / kStep, (any.end + kStep - 1) / kStep};
    return block;
  }

  template <int kHalves>
  void attend_rows(const RowBlock& block, StateRows state) {
    if (block.steps.begin >= block.steps.end) return set_empty(block, state);
    Maxima best;
    const BFloat16* q = scratch_.q + int64_t{block.first} * tiled_dim_;
    for (int step = block.steps.begin; step < block.steps.end; ++step) {
      score_step<kHalves>(q, scratch_.keys, tiled_dim_ / 32, step, scratch_.scores);
      for (int half = 0; half < kHalves; ++half) finish_scores(block, 16 * half, 16, step, best);
    }
    float shift[kAmxRows], sums[kAmxRows];
    set_maxima(block, best, shift, state);
    for (int half = 0; half < kHalves; ++half)
      weigh_sixteen(scratch_.scores + half * kHalfScores, block.steps, factor(), shift + 16 * half,
                    scratch_.weights + half * kHalfWeights, sums + 16 * half);
    weigh_values<kHalves>(scratch_.weights, scratch_.values, block.steps, tiled_dim_, scratch_.o);
    for (int r = 0; r < block.num_rows; ++r) {
      state.d[block.first + r] = sums[r];
      float* to = state.o + int64_t{block.first + r} * job_.padded_dim;
      for (int d = 0; d < job_.padded_dim; d += kLanes) store(to + d, load(scratch_.o + r * tiled_dim_ + d));
    }
  }

  // All rows of the tile.
  template <class T>
  void attend_few(const RowBlock& block, int split_begin, NextSplit next, StateRows state) {
    if (block.steps.begin >= block.steps.end) return set_empty(block, state);
    KeyRows<T> rows[kSplit / kKeyTile];
    const KeyRange tiles = {block.steps.begin / 2, (block.steps.end + 1) / 2};
    for (int t = tiles.begin; t < tiles.end; ++t) {
      const int begin = split_begin + t * kKeyTile;
      rows[t].find(p_, job_, begin, intersect(keys_of(split_begin), {begin, begin + kKeyTile}));
    }
    Maxima best;
    const int64_t to_values = p_.layout.values_after_keys();
    for (int t = tiles.begin; t < tiles.end; ++t) {
      const bool last = t + 1 == tiles.end;
      const NextRows<T> ahead = {rows[last ? tiles.begin : t + 1].at, last ? to_values : 0};
      score_columns(scratch_.q, rows_, rows[t], ahead, dim_, job_.shape->block_size, scratch_.keys,
                    scratch_.scores + 4 * t * kTileFloats);
      const KeyRange steps = intersect(block.steps, {2 * t, 2 * t + 2});
      for (int step = steps.begin; step < steps.end; ++step) finish_scores(block, 0, rows_, step, best);
    }
    float shift[kAmxRows];
    set_maxima(block, best, shift, state);
    for (int r = 0; r < rows_; ++r)
      state.d[r] = weigh_in_place(scratch_.scores + 16 * r, block.steps, factor(), shift[r]);
    KeyRows<T> after;
    find_first<T>(next, after);
    const WithoutSubnormals as_the_unit;
    with_rows<kFewRows>(rows_, [&]<int R>() {
      weigh_values_in_place<R>(scratch_.scores, rows, to_values, block.steps, after, dim_, state.o);
    });
  }

  // The first keys of a split.
  template <class T>
  void find_first(NextSplit next, KeyRows<T>& rows) const {
    AttendJob job = job_;
    job.head = next.head;
    const KeyRange keys = keys_of(next.split * kSplit);
    const int begin = keys.begin / kKeyTile * kKeyTile;
    rows.find(p_, job, begin, intersect(keys, {begin, begin + kKeyTile}));
  }

  // The rows' maxima in the units of scaled scores, and what their weights' exponents are to be less by.
  void set_maxima(const RowBlock& block, const Maxima& best, float* shift, StateRows state) const {
    for (int r = 0; r < kAmxRows; ++r) {
      const float m = largest_lane(best.of[r]) * (is_scaled() ? 1.0f : p_.scale);
      shift[r] = m == -__builtin_inff() ? 0.0f : m * kLog2E;
      if (r < block.num_rows) state.m[block.first + r] = m;
    }
  }

  void set_empty(const RowBlock& block, StateRows state) const {
    float* o = state.o + int64_t{block.first} * job_.padded_dim;
    for (int64_t i = 0; i < int64_t{block.num_rows} * job_.padded_dim; ++i) o[i] = 0.0f;
    for (int row = block.first; row < block.first + block.num_rows; ++row) {
      state.m[row] = -__builtin_inff();
      state.d[row] = 0.0f;
    }
  }

  // Whether scores are scaled in memory, because something is done to them that does not commute with it.
  bool is_scaled() const { return p_.bias != nullptr || p_.soft_cap > 0; }
  // From the scores in memory to exponents of 2.
  float factor() const { return is_scaled() ? kLog2E : p_.scale * kLog2E; }

  // What is left to do to a step's scores before they are weighed, and their maxima: of `count` rows of the
  // block from `first` on, a multiple of sixteen.
  void finish_scores(const RowBlock& block, int first, int count, int step, Maxima& best) const {
    float* scores = scratch_.scores + first / 16 * kHalfScores + 2 * step * kTileFloats;
    const KeyRange keys = {step * kStep, step * kStep + kStep};
    if (p_.bias != nullptr) add_bias(block, first, count, keys.begin, scores);
    if (p_.soft_cap > 0) cap_scores(count, scores);
    const KeyRange& all = block.all[first / 16];
    if (keys.begin < all.begin || keys.end > all.end)
      for (int r = 0; r < count; ++r) mask_row(scores + 16 * r, keys.begin, block.seen[first + r]);
    for (int r = 0; r < count; ++r, scores += 16) {
      VecF& row = best.of[first + r];
      row = max(row, max(load(scores), load(scores + kTileFloats)));
    }
  }

  void cap_scores(int count, float* scores) const {
    for (int r = 0; r < count; ++r, scores += 16)
      for (int j = 0; j < 2 * kTileFloats; j += kTileFloats)
        store(scores + j, soft_cap(load(scores + j) * p_.scale, p_.soft_cap));
  }

  void add_bias(const RowBlock& block, int first, int count, int first_key, float* scores) const {
    const VecF scale = broadcast(p_.scale);
    const int last = static_cast<int>(2 * p_.bias_reach);
    for (int r = 0; r < count; ++r, scores += 16) {
      const int from = block.bias_from[first + r] + first_key;
      const float* table = block.bias[first + r];
      store(scores, load(scores) * scale + bias_from(table, from, last));
      float* next = scores + kTileFloats;
      store(next, load(next) * scale + bias_from(table, from + kLanes, last));
    }
  }

  // A row's scores of 32 keys, -inf where it does not see them.
  static void mask_row(float* scores, int first_key, KeyRange seen) {
    VecI lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int j = 0; j < 32; j += kLanes) {
      float* at = scores + j / kLanes * kTileFloats;
      const VecI key = lane + (first_key + j);
      store(at, (key >= seen.begin) & (key < seen.end) ? load(at) : broadcast(-__builtin_inff()));
    }
  }

  const PagedAttentionParams& p_;
  const AttendJob& job_;
  const int dim_;
  const int tiled_dim_;
  const int group_;
  const int rows_;
  const AmxScratch scratch_;
};

}  // namespace

void attend(const PagedAttentionParams& p, const AttendJob& job, int split_begin, int split_end,
            float* scratch, float* partials) {
  AmxAttention tile(p, job, scratch);
  const TileScope tiles(tile.is_few() ? column_sizes(job.num_rows()) : TileSizes{});
  tile.gather();
  // The next item is probably of the next head, which reads the same blocks.
  const int next_head = job.head + 1 < job.shape->num_kv_heads ? job.head + 1 : job.head;
  const auto after = [&](int split) {
    return split + 1 < split_end ? NextSplit{job.head, split + 1} : NextSplit{next_head, split_begin};
  };
  with_cache_type(p.kv_dtype, [&]<class T>() {
    walk_splits(p, job, tile, split_begin, split_end, partials,
                [&](int split, StateRows state) { tile.attend_split<T>(split, after(split), state); });
  });
}

}  // namespace bequest::amx
