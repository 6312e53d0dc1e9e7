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
#include "attention/attend.h"
#include "attention/amx_packing.h"
#include "attention/amx_scratch.h"
#include "attention/tile_kernels.h"

namespace bequest::amx {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr int kTileFloats = 256;
constexpr int kTileHalves = 512;

// 2^x to 2^-18, for any x; 0 for -inf. NaN is kept.
inline __m512 exp2_weight(__m512 x) {
  // GCC 12 warns of the unmasked intrinsics.
  const __m512 f = _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.0135341678f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0520114601f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241442755f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693003833f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000262f));
  return _mm512_maskz_scalef_ps(0xffff, p, x);  // p · 2^floor(x)
}

// Rows [first, first + kAmxRows) of a tile in one split. Those beyond the last see what the last one sees.
struct RowBlock {
  int first;
  const float* bias[kAmxRows];  // of the row's head, if there are some
  int bias_from[kAmxRows];      // where the split's first key has its own among them
  KeyRange seen[kAmxRows];      // relative to the split
  KeyRange all[2];              // seen by every row of each half
  KeyRange steps;               // of 32 keys, around what any row sees
};

// scores [2, kSplit / 16] tiles = q · keysᵀ for the 32 keys of a step.
inline void score_step(const BFloat16* q, const BFloat16* keys, int depth_tiles, int step, float* scores) {
  const BFloat16* k0 = keys + int64_t{2 * step} * depth_tiles * kTileHalves;
  const BFloat16* k1 = k0 + int64_t{depth_tiles} * kTileHalves;
  const BFloat16* q1 = q + int64_t{depth_tiles} * kTileHalves;
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int64_t at = 0; at < int64_t{depth_tiles} * kTileHalves; at += kTileHalves) {
    load_tile<4>(q + at, kTileRowBytes);
    load_tile<6>(k0 + at, kTileRowBytes);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(k1 + at, kTileRowBytes);
    multiply_tiles<1, 4, 7>();
    load_tile<5>(q1 + at, kTileRowBytes);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
  float* to = scores + 2 * step * kTileFloats;
  store_tile<0>(to, kTileRowBytes);
  store_tile<1>(to + kTileFloats, kTileRowBytes);
  to += kSplit / 16 * kTileFloats;
  store_tile<2>(to, kTileRowBytes);
  store_tile<3>(to + kTileFloats, kTileRowBytes);
}

// o [kAmxRows, D] = weights · values over the keys of some steps.
inline void weigh_values(const BFloat16* weights, const BFloat16* values, KeyRange steps, int dim, float* o) {
  const BFloat16* w1 = weights + kSplit / 32 * kTileHalves;
  const int64_t column_tiles = dim / 16;
  for (int c = 0; c < column_tiles; c += 2) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (int64_t step = steps.begin; step < steps.end; ++step) {
      const BFloat16* v = values + (step * column_tiles + c) * kTileHalves;
      load_tile<4>(weights + step * kTileHalves, kTileRowBytes);
      load_tile<6>(v, kTileRowBytes);
      multiply_tiles<0, 4, 6>();
      load_tile<7>(v + kTileHalves, kTileRowBytes);
      multiply_tiles<1, 4, 7>();
      load_tile<5>(w1 + step * kTileHalves, kTileRowBytes);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
    const int64_t row_bytes = dim * sizeof(float);
    store_tile<0>(o + c * 16, row_bytes);
    store_tile<1>(o + c * 16 + 16, row_bytes);
    store_tile<2>(o + 16 * dim + c * 16, row_bytes);
    store_tile<3>(o + 16 * dim + c * 16 + 16, row_bytes);
  }
}

// best[16 rows] = max(best, scores) over a step's two tiles.
inline void raise_maxima(const float* scores, VecF* best) {
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r)
    best[r] = max(best[r], max(load(scores + 16 * r), load(scores + kTileFloats + 16 * r)));
}

// Sixteen rows' scores become weights: 2^(factor · score - shift[row]), and their sums.
// REQUIRES: whole steps; masked scores are -inf
__attribute__((noinline)) void weigh_scores(const float* scores, KeyRange steps, float factor,
                                            const float* shift, BFloat16* weights, float* sums) {
  const __m512 by = _mm512_set1_ps(factor);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 sum[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) sum[r] = _mm512_setzero_ps();
  for (int step = steps.begin; step < steps.end; ++step) {
    const float* s = scores + 2 * step * kTileFloats;
    BFloat16* w = weights + step * kTileHalves;
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      const __m512 by_shift = _mm512_set1_ps(shift[r]);
      const __m512 low = _mm512_fmsub_ps(_mm512_load_ps(s + 16 * r), by, by_shift);
      const __m512 high = _mm512_fmsub_ps(_mm512_load_ps(s + kTileFloats + 16 * r), by, by_shift);
      const __m512i pair = round_to_bfloat16(exp2_weight(low), exp2_weight(high));
      _mm512_store_si512(w + 32 * r, pair);
      sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)pair, ones);
    }
  }
  for (int r = 0; r < 16; ++r) sums[r] = reduce_add((VecF)sum[r]);
}

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
        store_rows(rows, scratch_.q + (int64_t{first} * tiled_dim_ + d * 16));
      }
  }

  // Leaves the state of one split in `state`.
  template <class T>
  void attend_split(int split, StateRows state) {
    const int begin = split * kSplit;
    pack<T>(begin);
    for (int first = 0; first < rows_; first += kAmxRows) attend_rows(block_at(first, begin), state);
  }

  StateRows total() const { return StateRows(scratch_.total, rows_, job_.padded_dim); }
  StateRows split_state() const { return StateRows(scratch_.split, rows_, job_.padded_dim); }

 private:
  const float* query(int row) const {
    return p_.q + (job_.tile->first_token + row / group_) * p_.q_stride +
           (int64_t{job_.head} * group_ + row % group_) * dim_;
  }

  template <class T>
  void pack(int split_begin) {
    const KeyRange wanted =
        intersect({job_.tile->key_begin, job_.tile->key_end}, {split_begin, split_begin + kSplit});
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
    block.steps = {any.begin / 32, (any.end + 31) / 32};
    return block;
  }

  void attend_rows(const RowBlock& block, StateRows state) {
    const int count = rows_ - block.first < kAmxRows ? rows_ - block.first : kAmxRows;
    if (block.steps.begin >= block.steps.end) return set_empty(block.first, count, state);
    VecF best[kAmxRows];
    for (VecF& b : best) b = broadcast(-__builtin_inff());
    const BFloat16* q = scratch_.q + int64_t{block.first} * tiled_dim_;
    for (int step = block.steps.begin; step < block.steps.end; ++step) {
      score_step(q, scratch_.keys, tiled_dim_ / 32, step, scratch_.scores);
      for (int half = 0; half < 2; ++half) finish_scores(block, half, step, best + 16 * half);
    }
    const bool scaled = finishes_all();
    const float unit = scaled ? 1.0f : p_.scale;  // of the scores in memory
    float shift[kAmxRows], sums[kAmxRows];
    for (int r = 0; r < kAmxRows; ++r) {
      const float m = largest_lane(best[r]) * unit;
      shift[r] = m == -__builtin_inff() ? 0.0f : m * kLog2E;
      if (r < count) state.m[block.first + r] = m;
    }
    for (int half = 0; half < 2; ++half)
      weigh_scores(scores_of(half), block.steps, unit * kLog2E, shift + 16 * half,
                   scratch_.weights + half * (kSplit / 32) * kTileHalves, sums + 16 * half);
    weigh_values(scratch_.weights, scratch_.values, block.steps, tiled_dim_, scratch_.o);
    for (int r = 0; r < count; ++r) {
      state.d[block.first + r] = sums[r];
      float* to = state.o + int64_t{block.first + r} * job_.padded_dim;
      for (int d = 0; d < job_.padded_dim; d += kLanes) store(to + d, load(scratch_.o + r * tiled_dim_ + d));
    }
  }

  void set_empty(int first, int count, StateRows state) const {
    for (int64_t i = 0; i < int64_t{count} * job_.padded_dim; ++i)
      state.o[int64_t{first} * job_.padded_dim + i] = 0.0f;
    for (int row = first; row < first + count; ++row) {
      state.m[row] = -__builtin_inff();
      state.d[row] = 0.0f;
    }
  }

  float* scores_of(int half) const { return scratch_.scores + half * (kSplit / 16) * kTileFloats; }

  // Whether scores are scaled in memory, because something is done to them that does not commute with it.
  bool finishes_all() const { return p_.bias != nullptr || p_.soft_cap > 0; }

  // What is left to do to the scores of sixteen rows and 32 keys before they are weighed; their maxima.
  void finish_scores(const RowBlock& block, int half, int step, VecF* best) const {
    float* scores = scores_of(half) + 2 * step * kTileFloats;
    const KeyRange keys = {step * 32, step * 32 + 32};
    if (p_.bias != nullptr) add_bias(block, 16 * half, keys.begin, scores);
    if (p_.soft_cap > 0)
      for (int i = 0; i < 2 * kTileFloats; i += kLanes)
        store(scores + i, soft_cap(load(scores + i) * p_.scale, p_.soft_cap));
    if (keys.begin < block.all[half].begin || keys.end > block.all[half].end)
      for (int r = 0; r < 16; ++r) mask_row(scores + 16 * r, keys.begin, block.seen[16 * half + r]);
    raise_maxima(scores, best);
  }

  void add_bias(const RowBlock& block, int first, int first_key, float* scores) const {
    const VecF scale = broadcast(p_.scale);
    const int last = static_cast<int>(2 * p_.bias_reach);
    for (int r = 0; r < 16; ++r, scores += 16) {
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

template <class T>
void attend_typed(const PagedAttentionParams& p, const AttendJob& job, int split_begin, int split_end,
                  float* scratch, float* partials) {
  const TileScope tiles(TileSizes{});
  AmxAttention tile(p, job, scratch);
  tile.gather();
  if (partials != nullptr) {
    const int64_t state_floats = int64_t{job.num_rows()} * (job.padded_dim + 2);
    for (int split = split_begin; split < split_end; ++split, partials += state_floats)
      tile.attend_split<T>(split, StateRows(partials, job.num_rows(), job.padded_dim));
    return;
  }
  if (split_begin < split_end)
    tile.attend_split<T>(split_begin, tile.total());  // merging with nothing would change no bit
  else
    avx512::clear_states(job, tile.total());
  for (int split = split_begin + 1; split < split_end; ++split) {
    tile.attend_split<T>(split, tile.split_state());
    avx512::merge_states(job, tile.total(), tile.split_state());
  }
  avx512::write_result(p, job, tile.total());
}

}  // namespace

void attend(const PagedAttentionParams& p, const AttendJob& job, int split_begin, int split_end,
            float* scratch, float* partials) {
  if (p.kv_dtype == DType::kF32)
    return attend_typed<float>(p, job, split_begin, split_end, scratch, partials);
  if (p.kv_dtype == DType::kF8E4M3)
    return attend_typed<Float8>(p, job, split_begin, split_end, scratch, partials);
  if (p.kv_dtype == kF16) return attend_typed<Float16>(p, job, split_begin, split_end, scratch, partials);
  attend_typed<BFloat16>(p, job, split_begin, split_end, scratch, partials);
}

}  // namespace bequest::amx
