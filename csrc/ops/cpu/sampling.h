// Chooses the next token of each row.
//
// In this order: allowed tokens, the step's mask, the catalogue, bad words, tokens held back until
// min_tokens, logit bias; repetition (prompt and outputs), frequency and presence (outputs) penalties;
// temperature; min_p, top_k, top_p; the draw. Below a temperature of 1e-5 the best token is taken instead,
// the lowest id among equals.
//
// A row's token depends on its own logits, parameters, history and position alone, bit for bit.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ops/cpu/sampling_row.h"
#include "ops/cpu/vocab_select.h"

namespace bequest {

struct SampleParams {
  const float* logits;       // [N, V], rows `stride` apart; not changed
  int64_t stride;            // elements
  const int32_t* rows;       // [N] open rows, none twice
  const int32_t* positions;  // [N] absolute position of the sampled token: keys its random numbers
  int64_t num;               // N
  const int32_t* masks;  // [N, ceil(V / 32)] bit i % 32 of word i / 32: token i may be sampled; null: all may
  int32_t* tokens;       // [N]; 0 where bad
  bool* bad;             // [N]: NaN or +inf in the logits, or nothing left to sample; the row stays as it was
};

class Sampler {
 public:
  static constexpr int32_t kNoRow = -1;

  Sampler(int32_t num_rows, int32_t vocab_size);

  int32_t vocab_size() const { return vocab_size_; }
  // `outputs`: tokens sampled before, when a sequence comes back. Throws if the row is open.
  void open_row(int32_t row, SamplingRowParams params, std::span<const int32_t> prompt,
                std::span<const int32_t> outputs);
  void close_row(int32_t row);
  // Only items of the catalogue from here on: SamplingRow::constrain.
  void constrain_row(int32_t row, std::shared_ptr<const Catalogue> catalogue, std::vector<int32_t> end_tokens,
                     std::span<const int32_t> outputs);

  // Writes the last token of rows[i] to ids[i], unless that is kNoRow.
  void resolve(int32_t* ids, const int32_t* rows, int64_t count) const;
  // Throws before any row changes.
  void sample(const SampleParams& p);
  // What `sample` would choose of these logits. No row changes, and a row may be there several times.
  void guess(const SampleParams& p);

 private:
  // A worker's memory, grown on first use.
  struct Scratch {
    std::vector<float> logits;
    SelectScratch select;
  };

  SamplingRow& at(int32_t row);
  void check_rows(const SampleParams& p);
  // Chooses for each item, and calls behind(row, token).
  template <class F>
  void choose_each(const SampleParams& p, F&& behind);
  // `mask` [ceil(V / 32)], or null.
  std::optional<int32_t> choose(const SamplingRow& row, const float* logits, const int32_t* mask,
                                int32_t position, Scratch& scratch);

  const int32_t vocab_size_;
  std::vector<std::optional<SamplingRow>> rows_;
  std::vector<Scratch> scratch_;
};

}  // namespace bequest
