// Rows of narrow steps (narrow_tail.cuh): the states that wide tiles and a tail have sent for a row, joined
// in the order of the list, whoever was first, and written to the output. By warps, a row at a time.
#pragma once

#include "attention/decode_warp.cuh"
#include "attention/mailbox.cuh"

namespace bequest {

// What the rows of a narrow tail are joined of, on its way from memory: unpacked where it is needed.
class JoinOfTail {
 public:
  __device__ JoinOfTail(const AttentionArgs& a, int tail) {
    const int4* const entry = a.merges + 2 * (a.num_merge_entries - 1 - tail);
    first_ = __ldg(entry);
    second_ = __ldg(entry + 1);
  }
  __device__ JoinEntry entry() const {
    return {first_.x, first_.y, first_.z, first_.w, second_.x, second_.y, second_.z, second_.w};
  }

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
  static constexpr int kTail = kMostJoined;  // the tail's part; those of the wide tile are before it
  static constexpr int kParts = kTail + 1;
  static constexpr int kLanes = 16;      // each with the scales of a part
  static constexpr int kWords = D / 64;  // of a part, for a lane
  static_assert(kParts <= kLanes);

  __device__ int tail() const { return min(row_, num_rows_ - 1) / a_.group; }

  __device__ void enter(const JoinEntry& entry) {
    const int row = row_ - tail() * a_.group;
    num_shared_ = entry.num_states;
    stride_ = entry.stride;
    first_place_ = mail_place(a_, head_, entry.state_row + row);
    tail_place_ = mail_place(a_, head_, entry.tail_row + row);
    out_ = static_cast<bf16*>(a_.out) +
           (static_cast<int64_t>(entry.token) * a_.num_q_heads + head_ * a_.group + row) * D;
  }

  __device__ bool has_part(int part) const { return part < num_shared_ || part == kTail; }
  __device__ int64_t place_of(int part) const {
    return part == kTail ? tail_place_ : first_place_ + part * stride_;
  }
  __device__ uint32_t* words_of(int part) const { return mail_words<D>(a_, place_of(part)) + lane_ * kWords; }
  __device__ uint32_t* scales_of(int part) const { return mail_scales(a_, place_of(part)); }

  __device__ void join_row() {
    const int own_part = lane_ % kLanes;  // whose scales this lane has
    uint32_t words[kParts][kWords];
    uint32_t scales[2];
#pragma unroll
    for (int s = 0; s < kParts; ++s) fill(words[s], has_part(s) ? kEmpty : 0);
    fill(scales, kEmpty);
    if (!has_part(own_part)) scales[0] = __float_as_uint(-INFINITY), scales[1] = 0;
    for (int asked = 0;; ++asked) {
      if (!has_come(scales)) look_for_mail(scales, scales_of(own_part));
#pragma unroll
      for (int s = 0; s < kParts; ++s)
        if (!has_come(words[s])) look_for_mail(words[s], words_of(s));
      bool all = has_come(scales);
#pragma unroll
      for (int s = 0; s < kParts; ++s) all = all && has_come(words[s]);
      if (__all_sync(0xffffffffu, all)) break;
      if (asked == kMostAsked) __trap();
    }
    write(words, weigh(__uint_as_float(scales[0]), __uint_as_float(scales[1])));
    empty();
  }

  // What the part with the scales {m, d} counts for in the result.
  __device__ float weigh(float m, float d) const {
    float highest = m;
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, distance));
    const float factor = exp2f(m - finite_or_zero(highest));
    float sum = factor * d;
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return factor * (a_.value_scale / sum);  // with the tail's own keys the sum is positive
  }

  // `weight`: of part lane % kLanes.
  __device__ void write(const uint32_t (&words)[kParts][kWords], float weight) const {
    float2 o[kWords] = {};
#pragma unroll
    for (int s = 0; s < kParts; ++s) {
      const float factor = __shfl_sync(0xffffffffu, weight, s);
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        o[i] = {o[i].x + __uint_as_float(words[s][i] << 16) * factor,
                o[i].y + __uint_as_float(words[s][i] & 0xffff0000u) * factor};
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      *reinterpret_cast<uint32_t*>(out_ + mail_column(lane_ * kWords + i)) = pack(o[i].x, o[i].y);
  }

  // When all lanes have what they asked for.
  __device__ void empty() const {
    empty_mail<kWords>(words_of(kTail));
#pragma unroll 4
    for (int s = 0; s < num_shared_; ++s) empty_mail<kWords>(words_of(s));
    if (lane_ < kParts && has_part(lane_)) empty_mail<2>(scales_of(lane_));
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
  int num_shared_, stride_;
  int64_t first_place_, tail_place_;
  bf16* out_;
};

}  // namespace bequest
