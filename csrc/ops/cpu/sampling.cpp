#include "ops/cpu/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/check.h"
#include "core/threads.h"

namespace bequest {
namespace {

// Draws from x [n] with the filters of `p`. REQUIRES: the row is finite with this maximum.
int32_t draw_filtered(const SamplingRowParams& p, const float* x, int32_t n, float max, const DrawKey& key,
                      SelectScratch& scratch) {
  const float inverse_temperature = 1.0f / p.temperature;
  const float floor =
      p.min_p > 0 ? max + std::log(p.min_p) * p.temperature : -std::numeric_limits<float>::infinity();
  if (p.top_k > 0 && p.top_k < n) {
    select_top(x, n, p.top_k, floor, scratch);
    if (p.top_p < 1) keep_nucleus(scratch.candidates, inverse_temperature, p.top_p);
    return draw_from(scratch.candidates.data(), static_cast<int64_t>(scratch.candidates.size()),
                     inverse_temperature, key);
  }
  Cutoff cutoff{floor, std::numeric_limits<int32_t>::max()};
  if (p.top_p < 1) cutoff = find_nucleus(x, n, max, inverse_temperature, p.top_p, floor, scratch);
  return draw(x, n, inverse_temperature, cutoff, find_first(x, n, max), key);
}

// -inf for every token of x [n] whose bit in `mask` is not set. Most words are all or nothing.
void keep_masked(const int32_t* mask, float* x, int32_t n) {
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  for (int32_t begin = 0; begin < n; begin += 32) {
    const auto word = static_cast<uint32_t>(mask[begin / 32]);
    if (word == ~uint32_t{0}) continue;
    const int32_t end = std::min(n, begin + 32);
    if (word == 0) {
      std::fill(x + begin, x + end, kMasked);
      continue;
    }
    for (int32_t i = begin; i < end; ++i)
      if ((word >> (i - begin) & 1) == 0) x[i] = kMasked;
  }
}

}  // namespace

Sampler::Sampler(int32_t num_rows, int32_t vocab_size) : vocab_size_(vocab_size) {
  check(num_rows > 0 && vocab_size > 0, "sampler: empty");
  rows_.resize(num_rows);
}

void Sampler::open_row(int32_t row, SamplingRowParams params, std::span<const int32_t> prompt,
                       std::span<const int32_t> outputs) {
  check(row >= 0 && row < static_cast<int32_t>(rows_.size()), "sampler: row out of range");
  check(!rows_[row], "sampler: the row is open");
  rows_[row].emplace(std::move(params), vocab_size_, prompt, outputs);
}

void Sampler::close_row(int32_t row) {
  at(row);
  rows_[row].reset();
}

void Sampler::constrain_row(int32_t row, std::shared_ptr<const Catalogue> catalogue,
                            std::vector<int32_t> end_tokens, std::span<const int32_t> outputs) {
  at(row).constrain(std::move(catalogue), std::move(end_tokens), outputs, vocab_size_);
}

SamplingRow& Sampler::at(int32_t row) {
  if (row < 0 || row >= static_cast<int32_t>(rows_.size()) || !rows_[row])
    fail("sampler: row " + std::to_string(row) + " is not open");
  return *rows_[row];
}

void Sampler::resolve(int32_t* ids, const int32_t* rows, int64_t count) const {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = rows[i];
    if (row == kNoRow) continue;
    if (row < 0 || row >= static_cast<int32_t>(rows_.size()) || !rows_[row] || rows_[row]->last_token() < 0)
      fail("sampler: row " + std::to_string(row) + " has no last token");
    ids[i] = rows_[row]->last_token();
  }
}

void Sampler::check_rows(const SampleParams& p) {
  std::vector<bool> seen(rows_.size());
  for (int64_t i = 0; i < p.num; ++i) {
    at(p.rows[i]);
    check(!seen[p.rows[i]], "sampler: a row occurs twice");
    seen[p.rows[i]] = true;
  }
}

std::optional<int32_t> Sampler::choose(const SamplingRow& row, const float* logits, const int32_t* mask,
                                       int32_t position, Scratch& scratch) {
  RowMax found = scan_max(logits, vocab_size_);
  if (!found.finite) return std::nullopt;
  const float* x = logits;
  if (mask || row.edits()) {
    scratch.logits.assign(logits, logits + vocab_size_);
    if (mask) keep_masked(mask, scratch.logits.data(), vocab_size_);
    row.edit(scratch.logits.data(), vocab_size_);
    x = scratch.logits.data();
    found = scan_max(x, vocab_size_);
    if (!found.finite) return std::nullopt;
  }
  const SamplingRowParams& params = row.params();
  if (params.greedy()) return find_first(x, vocab_size_, found.max);
  const DrawKey key{params.seed, static_cast<uint32_t>(position), params.choice};
  return draw_filtered(params, x, vocab_size_, found.max, key, scratch.select);
}

template <class F>
void Sampler::choose_each(const SampleParams& p, F&& behind) {
  const int64_t mask_words = (vocab_size_ + 31) / 32;
  const int workers = num_threads();
  if (static_cast<int>(scratch_.size()) < workers) scratch_.resize(workers);
  for_each_item(p.num, [&](int64_t i, int worker) {
    SamplingRow& row = *rows_[p.rows[i]];
    const int32_t* mask = p.masks ? p.masks + i * mask_words : nullptr;
    const auto token = choose(row, p.logits + i * p.stride, mask, p.positions[i], scratch_[worker]);
    p.bad[i] = !token;
    p.tokens[i] = token.value_or(0);
    behind(row, token);
  });
}

void Sampler::sample(const SampleParams& p) {
  check_rows(p);
  choose_each(p, [](SamplingRow& row, std::optional<int32_t> token) {
    if (token) {
      row.record(*token);
    } else {
      row.note_bad();
    }
  });
}

void Sampler::guess(const SampleParams& p) {
  for (int64_t i = 0; i < p.num; ++i) at(p.rows[i]);
  choose_each(p, [](const SamplingRow&, std::optional<int32_t>) {});
}

}  // namespace bequest
