// Matchers of grammars and the masks they make: constraints/matchers.h.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "constraints/matchers.h"
#include "core/check.h"

namespace py = pybind11;

namespace bequest {
namespace {

using Tokens = std::vector<uint32_t>;

// llguidance calls it in the middle of its work, without the interpreter, and knows no exceptions. Copies
// share the function: they may be made without the interpreter, too.
GrammarTokens::Tokenize tokenizer_of(py::function encode) {
  return [encode = std::make_shared<py::function>(std::move(encode))](std::string_view text) -> Tokens {
    const py::gil_scoped_acquire held;
    try {
      return (*encode)(py::str(text.data(), text.size())).cast<Tokens>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the tokens of a grammar's text");
    } catch (const std::exception& error) {
      PySys_FormatStderr("the tokens of a grammar's text: %s\n", error.what());
    }
    return {};
  };
}

void bind_matcher(py::module_& m) {
  py::class_<Matcher>(m, "Matcher")
      .def(py::init<std::shared_ptr<const GrammarTokens>, const std::string&, const MatcherLimits&>(),
           py::arg("tokens"), py::arg("grammar"), py::arg("limits"), py::call_guard<py::gil_scoped_release>())
      .def("copy", &Matcher::copy)
      .def_property_readonly("is_error", &Matcher::is_error)
      .def_property_readonly("is_stopped", &Matcher::is_stopped)
      .def_property_readonly("is_accepting", &Matcher::is_accepting)
      .def_property_readonly("error", &Matcher::error)
      .def(
          "consume", [](Matcher& matcher, const Tokens& tokens) { return matcher.consume(tokens); },
          py::arg("tokens"), py::call_guard<py::gil_scoped_release>())
      .def(
          "count_valid", [](Matcher& matcher, const Tokens& tokens) { return matcher.count_valid(tokens); },
          py::arg("tokens"), py::call_guard<py::gil_scoped_release>())
      .def("try_first_masks", &Matcher::try_first_masks, py::call_guard<py::gil_scoped_release>());
}

MaskPlace place_of(Address masks, size_t num_words) { return MaskPlace{pointer<uint32_t>(masks), num_words}; }

const Matcher& checked(const Matcher& matcher, size_t num_words) {
  check(matcher.tokens().num_words() == num_words, "a mask has a bit for each token of its matcher");
  return matcher;
}

std::vector<size_t> bound_fill_masks(const std::vector<std::pair<Matcher*, uint32_t>>& moved,
                                     const std::vector<std::pair<Matcher*, size_t>>& filled, Address masks,
                                     size_t num_words, int num_threads) {
  std::vector<Move> moves;
  for (const auto& [matcher, token] : moved) moves.push_back({matcher, token});
  std::vector<MaskRow> rows;
  for (const auto& [matcher, row] : filled) {
    checked(*matcher, num_words);
    rows.push_back({matcher, row});
  }
  return fill_masks(moves, rows, place_of(masks, num_words), num_threads);
}

std::vector<std::pair<size_t, std::string>> bound_fill_ahead(
    const std::vector<std::tuple<Matcher*, size_t, Tokens>>& drafted, Address masks, size_t num_words,
    int num_threads) {
  std::vector<DraftedRow> rows;
  for (const auto& [matcher, row, drafts] : drafted) {
    checked(*matcher, num_words);
    rows.push_back({matcher, row, drafts});
  }
  return fill_ahead(rows, place_of(masks, num_words), num_threads);
}

}  // namespace

void bind_constraints(py::module_& m) {
  py::class_<GrammarTokens, std::shared_ptr<GrammarTokens>>(m, "GrammarTokens")
      .def(py::init([](const std::string& library, const std::vector<std::string>& tokens, uint32_t end_token,
                       py::function encode) {
             const GrammarTokens::Tokenize tokenize = tokenizer_of(std::move(encode));
             const py::gil_scoped_release others_run;  // it takes a second
             return std::make_shared<GrammarTokens>(library, tokens, end_token, tokenize);
           }),
           py::arg("library"), py::arg("tokens"), py::arg("end_token"), py::arg("encode"));
  py::class_<MatcherLimits>(m, "MatcherLimits")
      .def(py::init([](uint64_t step_lexer_fuel, size_t step_max_items, size_t max_lexer_states,
                       size_t max_grammar_size) {
             return MatcherLimits{step_lexer_fuel, step_max_items, max_lexer_states, max_grammar_size};
           }),
           py::kw_only(), py::arg("step_lexer_fuel"), py::arg("step_max_items"), py::arg("max_lexer_states"),
           py::arg("max_grammar_size"));
  bind_matcher(m);
  m.def("fill_masks", &bound_fill_masks, py::arg("moves"), py::arg("rows"), py::arg("masks"),
        py::arg("num_words"), py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
  m.def("fill_ahead", &bound_fill_ahead, py::arg("rows"), py::arg("masks"), py::arg("num_words"),
        py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace bequest
