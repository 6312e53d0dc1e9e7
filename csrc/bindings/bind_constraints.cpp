// Matchers of grammars and the masks they make: constraints/matchers.h, constraints/answers.h.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "constraints/answers.h"
#include "core/check.h"
#include "core/flag.h"

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

const Answer& checked(const Answer& answer, size_t num_words) {
  check(answer.matcher.tokens().num_words() == num_words, "a mask has a bit for each token of its matcher");
  return answer;
}

using HeldAnswer = std::shared_ptr<Answer>;

HeldAnswer begin_answer(const Matcher& start, const Tokens& ends) {
  check(!ends.empty(), "an answer has an end token");
  const size_t size = 32 * start.tokens().num_words();
  check(std::all_of(ends.begin(), ends.end(), [&](uint32_t token) { return token < size; }),
        "an end token is a token of the vocabulary");
  return std::make_shared<Answer>(Answer{.matcher = start.copy(), .ends = ends});
}

void bind_answer(py::module_& m) {
  py::class_<Answer, HeldAnswer>(m, "GrammarMatcher")
      .def(py::init(&begin_answer), py::arg("start"), py::arg("ends"))
      .def_readonly("num_seen", &Answer::num_seen)
      .def_readwrite("ended", &Answer::ended)
      .def_readwrite("failed", &Answer::failed)
      .def_readwrite("failed_ahead", &Answer::failed_ahead)
      .def_property_readonly(
          "why_nothing",
          [](const Answer& answer) { return answer.failed ? answer.failed : answer.failed_ahead; })
      .def_property_readonly("done", &Answer::done)
      .def_property_readonly("error", [](const Answer& answer) { return answer.matcher.error(); })
      .def(
          "see",
          [](Answer& answer, const std::vector<std::optional<uint32_t>>& tokens) { answer.see(tokens); },
          py::arg("tokens"));
}

// The answers of a step that is about to be launched. They are the same for as long as it is.
class StepAnswers {
 public:
  explicit StepAnswers(std::vector<HeldAnswer> answers) : answers_(std::move(answers)) {
    for (const HeldAnswer& answer : answers_) needed_.push_back(answer->num_sampled++);
  }

  // Whether what comes before the step is known.
  bool ready() const {
    for (size_t i = 0; i < answers_.size(); ++i) {
      if (answers_[i]->num_seen < needed_[i] && !answers_[i]->done()) return false;
    }
    return true;
  }

  // One sample of each, from number `first` on.
  void see(const py::array_t<int32_t, py::array::c_style>& tokens,
           const py::array_t<bool, py::array::c_style>& bad, ssize_t first) {
    const auto last = first + static_cast<ssize_t>(answers_.size());
    check(first >= 0 && tokens.size() >= last && bad.size() >= last, "an answer has no sample");
    for (size_t i = 0; i < answers_.size(); ++i) {
      const ssize_t at = first + static_cast<ssize_t>(i);
      std::optional<uint32_t> token;
      if (!bad.data()[at]) token = static_cast<uint32_t>(tokens.data()[at]);
      answers_[i]->see({&token, 1});
    }
  }

  // A mask of each. Without the interpreter. Then sets the flag, if there is one, unless a matcher failed:
  // that has to be known before anybody samples.
  std::vector<size_t> fill(Address masks, size_t num_words, int num_threads,
                           const std::optional<std::pair<Address, uint32_t>>& flag) {
    std::vector<MaskRow> rows;
    rows.reserve(answers_.size());
    for (const HeldAnswer& answer : answers_) {
      checked(*answer, num_words);
      rows.push_back({answer.get(), rows.size()});
    }
    const std::vector<size_t> failed = fill_masks(rows, place_of(masks, num_words), num_threads);
    if (flag && failed.empty()) publish(pointer<uint32_t>(flag->first), flag->second);
    return failed;
  }

 private:
  std::vector<HeldAnswer> answers_;
  std::vector<int64_t> needed_;  // steps that each has to have seen
};

void bind_step_answers(py::module_& m) {
  py::class_<StepAnswers>(m, "StepAnswers")
      .def(py::init<std::vector<HeldAnswer>>(), py::arg("answers"))
      .def_property_readonly("ready", &StepAnswers::ready)
      .def("see", &StepAnswers::see, py::arg("tokens"), py::arg("bad_rows"), py::arg("first"))
      .def("fill", &StepAnswers::fill, py::arg("masks"), py::arg("num_words"), py::arg("num_threads"),
           py::arg("flag"), py::call_guard<py::gil_scoped_release>());
}

std::vector<size_t> bound_fill_masks(const std::vector<std::pair<Answer*, size_t>>& filled, Address masks,
                                     size_t num_words, int num_threads) {
  std::vector<MaskRow> rows;
  for (const auto& [answer, row] : filled) {
    checked(*answer, num_words);
    rows.push_back({answer, row});
  }
  return fill_masks(rows, place_of(masks, num_words), num_threads);
}

std::vector<std::pair<size_t, std::string>> bound_fill_ahead(
    const std::vector<std::tuple<Answer*, size_t, Tokens>>& drafted, Address masks, size_t num_words,
    int num_threads) {
  std::vector<DraftedRow> rows;
  for (const auto& [answer, row, drafts] : drafted) {
    checked(*answer, num_words);
    rows.push_back({answer, row, drafts});
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
  bind_answer(m);
  bind_step_answers(m);
  m.def("fill_masks", &bound_fill_masks, py::arg("rows"), py::arg("masks"), py::arg("num_words"),
        py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
  m.def("fill_ahead", &bound_fill_ahead, py::arg("rows"), py::arg("masks"), py::arg("num_words"),
        py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace bequest
