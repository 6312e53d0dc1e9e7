#include "constraints/matchers.h"

#include <algorithm>
#include <array>
#include <bit>

#include "core/check.h"

namespace bequest {

namespace {

constexpr size_t kMostKnownBytes = 1 << 20;  // of texts and their tokens
constexpr size_t kLongestKnown = 4096;       // bytes of a text
constexpr int kMostForced = 64;              // tokens that a trial goes on by

}  // namespace

GrammarTokens::GrammarTokens(const std::string& library, const std::vector<std::string>& tokens,
                             uint32_t end_token, Tokenize tokenize)
    : library_(library),
      tokenize_(std::move(tokenize)),
      end_token_(end_token),
      num_words_((tokens.size() + 31) / 32) {
  std::vector<uint32_t> lengths;
  std::string bytes;
  for (const std::string& token : tokens) {
    lengths.push_back(static_cast<uint32_t>(token.size()));
    bytes += token;
  }
  llguidance::TokenizerInit init;
  init.vocab_size = static_cast<uint32_t>(tokens.size());
  init.end_token = end_token;
  init.token_lengths = lengths.data();
  init.token_bytes = reinterpret_cast<const uint8_t*>(bytes.data());
  init.tokenize_assumes_string = true;
  init.tokenize = &GrammarTokens::tokenize;
  init.context = this;
  std::array<char, 512> error = {};
  handle_ = library_.new_tokenizer(&init, error.data(), error.size());
  if (handle_ == nullptr) fail(error.data());
}

GrammarTokens::~GrammarTokens() { library_.free_tokenizer(handle_); }

size_t GrammarTokens::tokenize(const void* context, const uint8_t* bytes, size_t num_bytes, uint32_t* tokens,
                               size_t room) {
  const auto& self = *static_cast<const GrammarTokens*>(context);
  const std::vector<uint32_t> found =
      self.remembered(std::string_view(reinterpret_cast<const char*>(bytes), num_bytes));
  std::copy_n(found.begin(), std::min(room, found.size()), tokens);
  return found.size();
}

std::vector<uint32_t> GrammarTokens::remembered(std::string_view text) const {
  if (text.size() > kLongestKnown) return tokenize_(text);
  std::string key(text);
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
  }
  std::vector<uint32_t> tokens = tokenize_(text);  // without the lock: it waits for the interpreter
  const size_t size = key.size() + sizeof(uint32_t) * tokens.size();
  const std::lock_guard lock(mutex_);
  if (known_bytes_ + size > kMostKnownBytes) {
    known_.clear();
    known_bytes_ = 0;
  }
  if (known_.emplace(std::move(key), tokens).second) known_bytes_ += size;
  return tokens;
}

Matcher::Matcher(std::shared_ptr<const GrammarTokens> tokens, const std::string& grammar,
                 const MatcherLimits& limits)
    : tokens_(std::move(tokens)), handle_(nullptr, Free{&tokens_->library()}) {
  // The text goes on as a C string: what is behind a zero would be lost.
  check(grammar.find('\0') == std::string::npos, "a grammar's JSON has no zero bytes");
  llguidance::ConstraintInit init;
  library().constraint_init_set_defaults(&init, tokens_->handle());
  init.log_stderr_level = 0;
  init.limits.step_lexer_fuel = limits.step_lexer_fuel;
  init.limits.step_max_items = limits.step_max_items;
  init.limits.max_lexer_states = limits.max_lexer_states;
  init.limits.max_grammar_size = limits.max_grammar_size;
  init.limits.verbose_errors = false;
  handle_.reset(library().new_matcher(&init, "llguidance", grammar.c_str()));
}

Matcher Matcher::copy() const {
  return Matcher(tokens_, Handle(library().clone_matcher(handle_.get()), handle_.get_deleter()));
}

std::string Matcher::error() const {
  const char* const error = library().matcher_get_error(handle_.get());
  return error == nullptr ? "" : error;
}

bool Matcher::consume(std::span<const uint32_t> tokens) {
  return library().matcher_consume_tokens(handle_.get(), tokens.data(), tokens.size()) == 0;
}

size_t Matcher::count_valid(std::span<const uint32_t> tokens) {
  return std::max(0, library().matcher_validate_tokens(handle_.get(), tokens.data(), tokens.size()));
}

bool Matcher::fill(uint32_t* mask) {
  const size_t num_bytes = sizeof(uint32_t) * tokens_->num_words();
  return library().matcher_compute_mask_into(handle_.get(), mask, num_bytes) == 0;
}

void Matcher::try_first_masks() {
  std::vector<uint32_t> mask(tokens_->num_words());
  for (int i = 0; i < kMostForced && fill(mask.data()) && !is_stopped(); ++i) {
    const auto is_set = [](uint32_t word) { return word != 0; };
    const auto word = std::find_if(mask.begin(), mask.end(), is_set);
    const bool forced = std::has_single_bit(*word) && std::none_of(word + 1, mask.end(), is_set);
    if (!forced) return;
    const auto token = static_cast<uint32_t>(32 * (word - mask.begin()) + std::countr_zero(*word));
    if (token == tokens_->end_token() || !consume({&token, 1})) return;
  }
}

}  // namespace bequest
