// Where an answer stands in its grammar, and the masks of the tokens that may come next: llguidance's
// matchers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "constraints/llguidance.h"

namespace bequest {

// A vocabulary as llguidance wants it. Immutable, but for what it remembers.
class GrammarTokens {
 public:
  // The tokens of a text, in the vocabulary's own way. Any thread; must not throw.
  using Tokenize = std::function<std::vector<uint32_t>(std::string_view)>;

  // `library`: the path of llguidance's extension. tokens [V]: bytes, a special token's behind a byte 0xFF.
  GrammarTokens(const std::string& library, const std::vector<std::string>& tokens, uint32_t end_token,
                Tokenize tokenize);
  ~GrammarTokens();
  GrammarTokens(const GrammarTokens&) = delete;
  GrammarTokens& operator=(const GrammarTokens&) = delete;

  const llguidance::Library& library() const { return library_; }
  const llguidance::Tokenizer* handle() const { return handle_; }
  uint32_t end_token() const { return end_token_; }
  size_t num_words() const { return num_words_; }  // of a mask

 private:
  static size_t tokenize(const void* context, const uint8_t* bytes, size_t num_bytes, uint32_t* tokens,
                         size_t room);
  std::vector<uint32_t> remembered(std::string_view text) const;

  const llguidance::Library library_;
  const Tokenize tokenize_;
  const uint32_t end_token_;
  const size_t num_words_;
  llguidance::Tokenizer* handle_ = nullptr;
  // A grammar forces the same few texts again and again, and each mask there asks for their tokens.
  mutable std::mutex mutex_;
  mutable std::unordered_map<std::string, std::vector<uint32_t>> known_;
  mutable size_t known_bytes_ = 0;
};

struct MatcherLimits {
  uint64_t step_lexer_fuel = 0;
  size_t step_max_items = 0;
  size_t max_lexer_states = 0;
  size_t max_grammar_size = 0;
};

// One answer's place in its grammar. One thread at a time.
class Matcher {
 public:
  // `grammar`: llguidance's JSON. A grammar that cannot be used makes a matcher with an error.
  Matcher(std::shared_ptr<const GrammarTokens> tokens, const std::string& grammar,
          const MatcherLimits& limits);

  Matcher copy() const;

  const GrammarTokens& tokens() const { return *tokens_; }
  bool is_error() const { return library().matcher_is_error(handle_.get()); }
  bool is_stopped() const { return library().matcher_is_stopped(handle_.get()); }
  bool is_accepting() const { return library().matcher_is_accepting(handle_.get()); }
  std::string error() const;

  // Whether it could: else it has an error from now on.
  bool consume(std::span<const uint32_t> tokens);
  // How many of the first ones it takes; it stays where it is.
  size_t count_valid(std::span<const uint32_t> tokens);
  // mask [words]. False: it has an error, and the mask is as it was.
  bool fill(uint32_t* mask);
  // Fills masks for nobody and goes on by the only token that may come, up to where there is a choice or the
  // end. What is forced is found in masks: 1.6.1's function for it writes beyond the room that it is given.
  void try_first_masks();

 private:
  struct Free {
    const llguidance::Library* library;
    void operator()(llguidance::Matcher* matcher) const { library->free_matcher(matcher); }
  };
  using Handle = std::unique_ptr<llguidance::Matcher, Free>;

  Matcher(std::shared_ptr<const GrammarTokens> tokens, Handle handle)
      : tokens_(std::move(tokens)), handle_(std::move(handle)) {}
  const llguidance::Library& library() const { return tokens_->library(); }

  std::shared_ptr<const GrammarTokens> tokens_;
  Handle handle_;
};

}  // namespace bequest
