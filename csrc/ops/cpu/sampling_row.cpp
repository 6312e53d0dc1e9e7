#include "ops/cpu/sampling_row.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/check.h"

namespace bequest {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

void check_ids(std::span<const int32_t> ids, int32_t vocab_size, const char* what) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size)
      fail(std::string("sampler: token ") + std::to_string(id) + " in " + what +
           " is outside the vocabulary");
  }
}

void check_params(const SamplingRowParams& p, int32_t vocab_size) {
  check(p.temperature >= 0 && p.top_k >= 0 && p.top_p > 0 && p.top_p <= 1 && p.min_p >= 0 && p.min_p <= 1 &&
            p.repetition_penalty > 0,
        "sampler: parameter out of range");
  for (const auto& [token, _] : p.logit_bias) check_ids({&token, 1}, vocab_size, "logit_bias");
  for (const auto& word : p.bad_words) {
    check(!word.empty(), "sampler: empty bad word");
    check_ids(word, vocab_size, "bad_words");
  }
  if (p.allowed) check_ids(*p.allowed, vocab_size, "allowed_token_ids");
  check_ids(p.held_back, vocab_size, "stop tokens");
}

void keep_only(std::span<const int32_t> tokens, float* logits, int32_t vocab_size) {
  std::vector<float> kept;
  kept.reserve(tokens.size());
  for (const int32_t token : tokens) kept.push_back(logits[token]);
  std::fill(logits, logits + vocab_size, kMasked);
  for (size_t i = 0; i < kept.size(); ++i) logits[tokens[i]] = kept[i];
}

}  // namespace

SamplingRow::SamplingRow(SamplingRowParams params, int32_t vocab_size, std::span<const int32_t> prompt,
                         std::span<const int32_t> outputs)
    : params_(std::move(params)) {
  check_params(params_, vocab_size);
  check_ids(prompt, vocab_size, "the prompt");
  check_ids(outputs, vocab_size, "the outputs");
  for (const auto& word : params_.bad_words) longest_bad_word_ = std::max(longest_bad_word_, word.size());
  for (const int32_t token : prompt) {
    if (params_.repetition_penalty != 1) count(token, 0);
    remember(token);
  }
  for (const int32_t token : outputs) record(token);
}

void SamplingRow::count(int32_t token, int32_t outputs) {
  const auto [at, added] = count_index_.try_emplace(token, static_cast<int32_t>(counts_.size()));
  if (added) counts_.push_back({token, 0});
  counts_[at->second].outputs += outputs;
}

void SamplingRow::remember(int32_t token) {
  if (longest_bad_word_ < 2) return;
  if (tail_.size() == longest_bad_word_ - 1) tail_.erase(tail_.begin());
  tail_.push_back(token);
}

void SamplingRow::constrain(std::shared_ptr<const Catalogue> catalogue, std::vector<int32_t> end_tokens,
                            std::span<const int32_t> outputs, int32_t vocab_size) {
  check(catalogue->vocab_size() <= vocab_size, "sampler: the catalogue is of a larger vocabulary");
  check_ids(end_tokens, vocab_size, "end tokens");
  catalogue_ = std::move(catalogue);
  end_tokens_ = std::move(end_tokens);
  for (const int32_t token : outputs) follow(token);
}

void SamplingRow::follow(int32_t token) {
  if (catalogue_ && node_ >= 0) node_ = catalogue_->child(node_, token);
}

void SamplingRow::record(int32_t token) {
  follow(token);
  if (params_.penalises()) count(token, 1);
  remember(token);
  ++num_outputs_;
  last_token_ = token;
}

bool SamplingRow::edits() const {
  return params_.allowed || catalogue_ || !params_.bad_words.empty() || !params_.logit_bias.empty() ||
         params_.penalises() || (num_outputs_ < params_.min_tokens && !params_.held_back.empty());
}

void SamplingRow::edit(float* logits, int32_t vocab_size) const {
  mask(logits, vocab_size);
  for (const auto& [token, bias] : params_.logit_bias) logits[token] += bias;
  penalise(logits);
}

std::vector<int32_t> SamplingRow::next_of_item() const {
  if (node_ < 0) return {};
  const auto children = catalogue_->children(node_);
  std::vector<int32_t> tokens(children.begin(), children.end());
  if (catalogue_->is_terminal(node_)) tokens.insert(tokens.end(), end_tokens_.begin(), end_tokens_.end());
  return tokens;
}

void SamplingRow::mask(float* logits, int32_t vocab_size) const {
  if (params_.allowed) keep_only(*params_.allowed, logits, vocab_size);
  if (catalogue_) keep_only(next_of_item(), logits, vocab_size);
  for (const auto& word : params_.bad_words) {
    const size_t before = word.size() - 1;
    if (before <= tail_.size() && std::equal(word.begin(), word.end() - 1, tail_.end() - before))
      logits[word.back()] = kMasked;
  }
  if (num_outputs_ < params_.min_tokens)
    for (const int32_t token : params_.held_back) logits[token] = kMasked;
}

void SamplingRow::penalise(float* logits) const {
  for (const auto& [token, outputs] : counts_) {
    float& x = logits[token];
    if (params_.repetition_penalty != 1)
      x = x > 0 ? x / params_.repetition_penalty : x * params_.repetition_penalty;
    if (outputs > 0) x -= params_.frequency_penalty * static_cast<float>(outputs) + params_.presence_penalty;
  }
}

}  // namespace bequest
