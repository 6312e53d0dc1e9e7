// Rows of narrow steps (narrow_tail.cuh): the states that wide tiles and a tail have sent for a row, joined
// in the order of the list, whoever was first, and written to the output. By warps, a row at a time.
#pragma once

#include "attention/cuda/decode_warp.cuh"
#include "attention/cuda/mailbox.cuh"
#include "device/exchange.cuh"
#include "device/pairs.cuh"
#include "device/reductions.cuh"

namespace bequest::cuda {

// What the rows of a narrow tail are joined of, on its way from memory: unpacked where it is needed.
class JoinOfTail {
 public:
  __device__ JoinOfTail(const AttentionArgs& a, int tail) {
    const int4* const entry = a.merges + 2 * (a.num_merge_entries - 1 - tail);
    first_ = __ldg(entry);
    second_ = __ldg(entry + 1);
  }
  __device__ JoinEntry entry() const { return unpack_join(first_, second_); }

 private:
  int4 first_, second_;
};

// The rows of one head that a warp joins.
template <int D>
class RowJoiner {
 public:
  // Reads what came before any kernel of the step.
  __device__ RowJoiner(const AttentionArgs& a, int num_tails, int head)
      : a_(a),
        head_(head),
        lane_(threadIdx.x % 32),
        num_rows_(num_tails * a.group),
        row_(worker_of_block() * kDecodeWarps + static_cast<int>(threadIdx.x) / 32),
        join_(a, tail()) {}

  __device__ void join() {
    for (; row_ < num_rows_; join_ = JoinOfTail(a_, tail())) {
      enter(join_.entry());
      join_row();
      row_ += static_cast<int>(gridDim.x) * kDecodeWarps;
      if (row_ >= num_rows_) return;
    }
  }

 private:
  static constexpr int kBatch = 16;      // parts in flight
  static constexpr int kWords = D / 64;  // of a part, for a lane
  static_assert(kMostMailed <= 32, "a lane has the scales of one part");

  __device__ int tail() const { return min(row_, num_rows_ - 1) / a_.group; }

  __device__ void enter(const JoinEntry& entry) {
    const int row = row_ - tail() * a_.group;
    num_parts_ = entry.num_states;
    stride_ = entry.stride;
    first_place_ = mail_place(a_, head_, entry.state_row + row);
    tail_place_ = mail_place(a_, head_, entry.tail_row + row);
    out_ = static_cast<bf16*>(a_.out) +
           (static_cast<int64_t>(entry.token) * a_.num_q_heads + head_ * a_.group + row) * D;
  }

  // Part `part` of those that the wide tile has sent.
  __device__ int64_t place_of(int part) const { return first_place_ + part * stride_; }
  __device__ uint32_t* words_at(int64_t place) const { return mail_words<D>(a_, place) + lane_ * kWords; }

  __device__ void join_row() {
    uint32_t batch[kBatch][kWords], tail[kWords], tail_scales[2], scales[2];
    fill(tail, kEmpty);
    fill(tail_scales, kEmpty);
    fill(scales, kEmpty);
    const bool has_part = lane_ < num_parts_;
    if (!has_part) scales[0] = __float_as_uint(-INFINITY), scales[1] = 0;
    ask(batch, 0, [&] {
      if (!has_come(scales)) load_relaxed(scales, mail_scales(a_, place_of(lane_)));
      if (!has_come(tail_scales)) load_relaxed(tail_scales, mail_scales(a_, tail_place_));
      if (!has_come(tail)) load_relaxed(tail, words_at(tail_place_));
      return has_come(scales) && has_come(tail_scales) && has_come(tail);
    });
    const float tail_m = __uint_as_float(tail_scales[0]), m = __uint_as_float(scales[0]);
    const float highest = finite_or_zero(fmaxf(tail_m, warp_max(m)));
    const float tail_factor = exp2f(tail_m - highest), factor = exp2f(m - highest);
    const float sum =
        tail_factor * __uint_as_float(tail_scales[1]) + warp_sum(factor * __uint_as_float(scales[1]));
    const int q_head = head_ * a_.group + row_ % a_.group;
    const float inverse = a_.value_scale * output_factor(a_, q_head, highest, sum);
    float2 o[kWords] = {};
    add(o, tail, tail_factor * inverse);
    for (int first = 0;;) {
#pragma unroll
      for (int s = 0; s < kBatch; ++s) add(o, batch[s], __shfl_sync(kAllLanes, factor * inverse, first + s));
      first += kBatch;
      if (first >= num_parts_) break;
      ask(batch, first, [] { return true; });
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      *reinterpret_cast<uint32_t*>(out_ + mail_column(lane_ * kWords + i)) = pack(o[i].x, o[i].y);
    empty();
  }

  // Asks for the parts from `first` on, and whatever else `ask_more` asks for, until all are there.
  template <class AskMore>
  __device__ void ask(uint32_t (&batch)[kBatch][kWords], int first, AskMore&& ask_more) const {
#pragma unroll
    for (int s = 0; s < kBatch; ++s) fill(batch[s], first + s < num_parts_ ? kEmpty : 0);
    Patience patience;
    for (;;) {
#pragma unroll
      for (int s = 0; s < kBatch; ++s)
        if (!has_come(batch[s])) load_relaxed(batch[s], words_at(place_of(first + s)));
      bool all = ask_more();
#pragma unroll
      for (int s = 0; s < kBatch; ++s) all = all && has_come(batch[s]);
      if (__all_sync(kAllLanes, all)) return;
      patience.spend();
    }
  }

  __device__ static void add(float2 (&o)[kWords], const uint32_t (&words)[kWords], float factor) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      o[i] = {o[i].x + __uint_as_float(words[i] << 16) * factor,
              o[i].y + __uint_as_float(words[i] & 0xffff0000u) * factor};
  }

  // When all lanes have what they asked for.
  __device__ void empty() const {
    empty_mail<kWords>(words_at(tail_place_));
#pragma unroll 4
    for (int s = 0; s < num_parts_; ++s) empty_mail<kWords>(words_at(place_of(s)));
    if (lane_ < num_parts_) empty_mail<2>(mail_scales(a_, place_of(lane_)));
    if (lane_ == 0) empty_mail<2>(mail_scales(a_, tail_place_));
  }

  template <int kCount>
  __device__ static void fill(uint32_t (&words)[kCount], uint32_t value) {
#pragma unroll
    for (uint32_t& word : words) word = value;
  }

  const AttentionArgs& a_;
  const int head_, lane_, num_rows_;
  int row_;
  JoinOfTail join_;
  int num_parts_, stride_;
  int64_t first_place_, tail_place_;
  bf16* out_;
};

}  // namespace bequest::cuda
