// The part of llguidance's C interface that matchers need. Its Python package carries these functions in its
// extension, beside those for Python. They are looked up there at run time: nothing is linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bequest::llguidance {

struct Tokenizer;
struct Matcher;

// Writes at most `room` tokens and returns how many there are. Any thread.
using TokenizeFn = size_t (*)(const void* context, const uint8_t* bytes, size_t num_bytes, uint32_t* tokens,
                              size_t room);

// As llguidance.h has them. Fields may be appended there; zeros behind ours are their defaults.
struct TokenizerInit {
  uint32_t vocab_size = 0;
  uint32_t end_token = 0;
  const uint32_t* token_lengths = nullptr;  // [vocab_size]
  const uint8_t* token_bytes = nullptr;     // one token behind the other
  const char* tokenizer_json = nullptr;
  bool tokenize_assumes_string = false;
  TokenizeFn tokenize = nullptr;
  bool tokenize_greedily = false;
  const void* context = nullptr;
  const char* const* slices = nullptr;  // null: the usual ones
  uint64_t appended[32] = {};
};

struct ParserLimits {
  size_t max_items_in_row;
  uint64_t initial_lexer_fuel;
  uint64_t step_lexer_fuel;
  size_t step_max_items;
  size_t max_lexer_states;
  size_t max_grammar_size;
  bool precompute_large_lexemes;
  bool verbose_errors;
};

struct ConstraintInit {
  const Tokenizer* tokenizer;
  uint32_t log_buffer_level;
  uint32_t log_stderr_level;
  bool ff_tokens_ok;
  bool backtrack_ok;
  ParserLimits limits;
};

// The functions, without their prefix. What returns an int returns -1 where it fails.
struct Library {
  // Throws where a function is missing, or where a struct is not laid out as above.
  explicit Library(const std::string& path);

  void (*constraint_init_set_defaults)(ConstraintInit*, const Tokenizer*);
  Tokenizer* (*new_tokenizer)(const TokenizerInit*, char* error, size_t error_size);
  void (*free_tokenizer)(Tokenizer*);
  Matcher* (*new_matcher)(const ConstraintInit*, const char* kind, const char* text);
  Matcher* (*clone_matcher)(const Matcher*);
  void (*free_matcher)(Matcher*);
  int32_t (*matcher_compute_mask_into)(Matcher*, uint32_t* mask, size_t num_bytes);
  int32_t (*matcher_consume_tokens)(Matcher*, const uint32_t* tokens, size_t count);
  int32_t (*matcher_validate_tokens)(Matcher*, const uint32_t* tokens, size_t count);
  bool (*matcher_is_accepting)(Matcher*);
  bool (*matcher_is_stopped)(const Matcher*);
  bool (*matcher_is_error)(const Matcher*);
  const char* (*matcher_get_error)(Matcher*);

 private:
  void check_layout() const;
};

}  // namespace bequest::llguidance
