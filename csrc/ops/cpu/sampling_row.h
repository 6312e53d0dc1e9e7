// What one sequence's sampling remembers between steps, and what it does to the logits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/catalogue.h"

namespace bequest {

struct SamplingRowParams {
  float temperature = 1.0f;
  int32_t top_k = 0;  // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  uint64_t seed = 0;
  uint32_t choice = 0;
  int32_t min_tokens = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::optional<std::vector<int32_t>> allowed;  // nothing else is ever sampled
  std::vector<std::vector<int32_t>> bad_words;  // sequences whose last token is never sampled
  std::vector<int32_t> held_back;               // not sampled before min_tokens

  bool greedy() const { return temperature < 1e-5f; }
  bool penalises() const {
    return presence_penalty != 0 || frequency_penalty != 0 || repetition_penalty != 1;
  }
};

class SamplingRow {
 public:
  // Throws on token ids outside [0, vocab_size). `outputs` were sampled before.
  SamplingRow(SamplingRowParams params, int32_t vocab_size, std::span<const int32_t> prompt,
              std::span<const int32_t> outputs);

  // From here on only items of the catalogue are sampled, and where one is complete `end_tokens`. `outputs`:
  // what was sampled of an item so far.
  void constrain(std::shared_ptr<const Catalogue> catalogue, std::vector<int32_t> end_tokens,
                 std::span<const int32_t> outputs, int32_t vocab_size);

  const SamplingRowParams& params() const { return params_; }
  // -1 before the first.
  int32_t last_token() const { return last_token_; }
  // Nothing could be sampled. Counts and history stay; but the next step may be launched already, and its
  // input has to be some token, though nobody will look at what becomes of it.
  void note_bad() { last_token_ = 0; }
  // Whether the next token's logits are changed at all.
  bool edits() const;
  // Masks, bias and penalties, in place on logits [V].
  void edit(float* logits, int32_t vocab_size) const;
  void record(int32_t token);

 private:
  struct Count {
    int32_t token;
    int32_t outputs;  // 0: it is in the prompt alone
  };

  void count(int32_t token, int32_t outputs);
  void remember(int32_t token);
  void mask(float* logits, int32_t vocab_size) const;
  std::vector<int32_t> next_of_item() const;
  void follow(int32_t token);
  void penalise(float* logits) const;

  SamplingRowParams params_;
  size_t longest_bad_word_ = 0;
  int32_t num_outputs_ = 0;
  int32_t last_token_ = -1;
  std::vector<int32_t> tail_;  // the last longest_bad_word_ - 1 tokens, prompt included
  std::vector<Count> counts_;  // one per distinct token; empty without penalties
  std::unordered_map<int32_t, int32_t> count_index_;
  std::shared_ptr<const Catalogue> catalogue_;  // null: none
  std::vector<int32_t> end_tokens_;
  int32_t node_ = Catalogue::kRoot;  // -1: the item was ended
};

}  // namespace bequest
