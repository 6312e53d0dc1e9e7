#include "constraints/llguidance.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.h"

namespace bequest::llguidance {

namespace {

template <class F>
void look_up(void* library, const std::string& name, F& function) {
  void* const found = dlsym(library, ("llg_" + name).c_str());
  if (found == nullptr) fail("the llguidance that is installed has no function llg_" + name);
  function = reinterpret_cast<F>(found);
}

}  // namespace

Library::Library(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW);  // for good: matchers live as long as the process
  if (library == nullptr) fail("llguidance cannot be loaded from " + path);
  look_up(library, "constraint_init_set_defaults", constraint_init_set_defaults);
  look_up(library, "new_tokenizer", new_tokenizer);
  look_up(library, "free_tokenizer", free_tokenizer);
  look_up(library, "new_matcher", new_matcher);
  look_up(library, "clone_matcher", clone_matcher);
  look_up(library, "free_matcher", free_matcher);
  look_up(library, "matcher_compute_mask_into", matcher_compute_mask_into);
  look_up(library, "matcher_consume_tokens", matcher_consume_tokens);
  look_up(library, "matcher_validate_tokens", matcher_validate_tokens);
  look_up(library, "matcher_is_accepting", matcher_is_accepting);
  look_up(library, "matcher_is_stopped", matcher_is_stopped);
  look_up(library, "matcher_is_error", matcher_is_error);
  look_up(library, "matcher_get_error", matcher_get_error);
  check_layout();
}

// The library writes its defaults: they have to lie where our fields are, and nothing behind them.
void Library::check_layout() const {
  constexpr unsigned char kUntouched = 0xAA;
  alignas(ConstraintInit) std::array<unsigned char, 4 * sizeof(ConstraintInit)> written;
  written.fill(kUntouched);
  const auto* const given = reinterpret_cast<const Tokenizer*>(&written);  // an address that is not looked at
  constraint_init_set_defaults(reinterpret_cast<ConstraintInit*>(written.data()), given);
  ConstraintInit init;
  std::memcpy(static_cast<void*>(&init), written.data(), sizeof(init));
  const auto flag = [&](size_t offset) { return written[offset] <= 1; };
  const size_t limits = offsetof(ConstraintInit, limits);
  const bool flags = flag(offsetof(ConstraintInit, ff_tokens_ok)) &&
                     flag(offsetof(ConstraintInit, backtrack_ok)) &&
                     flag(limits + offsetof(ParserLimits, precompute_large_lexemes)) &&
                     flag(limits + offsetof(ParserLimits, verbose_errors));
  const ParserLimits& set = init.limits;
  const uint64_t sizes[] = {set.max_items_in_row, set.initial_lexer_fuel, set.step_lexer_fuel,
                            set.step_max_items,   set.max_lexer_states,   set.max_grammar_size};
  const bool counts =
      std::all_of(std::begin(sizes), std::end(sizes), [](uint64_t n) { return n > 0 && n < 1'000'000'000; });
  const bool end = std::all_of(written.begin() + sizeof(init), written.end(),
                               [](unsigned char byte) { return byte == kUntouched; });
  check(init.tokenizer == given && init.log_stderr_level <= 2 && flags && counts && end,
        "the llguidance that is installed has another C interface than 1.6");
}

}  // namespace bequest::llguidance
