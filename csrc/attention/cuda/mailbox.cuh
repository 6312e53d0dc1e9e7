// Partial softmax states on their way to the warps that join them, within one grid.
//
// Where nothing waits to be read all bits of each 32-bit word are set, which no state has, since the NaN that
// sums and conversions make is another. So each word says for itself whether it has come, and nobody needs a
// fence or a counter, each of them a trip to the L2: a reader asks for the words until all are there, and
// empties what it has taken. A row has one reader, and the next grid begins behind this one.
//
// Numerators are rounded to bf16, as the weights are that they are made of; maxima and sums stay float32. It
// halves what passes the L2. A row's words are pairs of columns in the order in which the matrix products
// leave them with the lanes: mail_column().
//
// Nobody waits in vain: a warp waits when it has sent its own states; there are no more thread blocks than
// the chip has room for at once; whatever else holds that room ends without them, and grids behind this one
// are let in when all of its blocks have begun. Should that ever be untrue, waiting ends in a trap.
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/device_args.cuh"
#include "device/exchange.cuh"

namespace bequest::cuda {

inline constexpr uint32_t kEmpty = 0xffffffffu;

// The first column of word `word` of a row, and its inverse. Of 32 columns lane t of four has the pairs at
// 8 n + 2 t, which are words 4 t + n.
__device__ inline int mail_column(int word) { return word / 16 * 32 + word % 4 * 8 + word / 4 % 4 * 2; }
__device__ inline int mail_word(int column) { return column / 32 * 16 + column % 8 / 2 * 4 + column / 8 % 4; }

// The place of a row of a head.
__device__ inline int64_t mail_place(const AttentionArgs& a, int head, int row) {
  return static_cast<int64_t>(head) * a.mail_rows + row;
}
template <int D>
__device__ inline uint32_t* mail_words(const AttentionArgs& a, int64_t place) {
  return a.mail + place * (D / 2);
}
__device__ inline uint32_t* mail_scales(const AttentionArgs& a, int64_t place) {
  return a.mail_scales + place * 2;
}

__device__ inline void send_scales(const AttentionArgs& a, int64_t place, float m, float d) {
  store_relaxed(mail_scales(a, place), m, d);
}

template <int kCount>
__device__ inline bool has_come(const uint32_t (&words)[kCount]) {
  bool all = true;
#pragma unroll
  for (const uint32_t word : words) all = all && word != kEmpty;
  return all;
}

template <int kCount>
__device__ inline void empty_mail(uint32_t* place) {
  struct alignas(kCount * 4) Words {
    uint32_t words[kCount];
  } empty;
#pragma unroll
  for (uint32_t& word : empty.words) word = kEmpty;
  *reinterpret_cast<Words*>(place) = empty;
}

}  // namespace bequest::cuda
