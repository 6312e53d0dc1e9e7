// Answers that are told whole: the texts of several in one call, and rows of JSON that have them. A search
// has as many choices as other requests have tokens. Owned by the thread of the event loop.
#include <pybind11/stl.h>

#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>

#include "bindings/bindings.h"
#include "core/check.h"

namespace py = pybind11;

namespace bequest {
namespace {

py::object owned(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// The bytes of tokens by id: a dict that looks for those it has not met.
class Spelling {
 public:
  Spelling(const py::dict& bytes_by_id, const py::frozenset& hidden)
      : bytes_(bytes_by_id), hidden_(PySet_GET_SIZE(hidden.ptr()) > 0 ? hidden.ptr() : nullptr) {}

  void append(PyObject* token, std::string& text) const {
    if (hidden_ != nullptr) {
      const int is_hidden = PySet_Contains(hidden_, token);
      if (is_hidden < 0) throw py::error_already_set();
      if (is_hidden) return;
    }
    PyObject* known = PyDict_GetItemWithError(bytes_.ptr(), token);
    if (known == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    const py::object found = known != nullptr ? py::reinterpret_borrow<py::object>(known)
                                              : owned(PyObject_GetItem(bytes_.ptr(), token));
    check(PyBytes_Check(found.ptr()), "a token is spelled in bytes");
    text.append(PyBytes_AS_STRING(found.ptr()), PyBytes_GET_SIZE(found.ptr()));
  }

 private:
  const py::dict& bytes_;
  PyObject* hidden_;  // null: none
};

// The text of each answer behind the bytes `begun`, which are part of a character.
py::list spell_answers(const py::dict& bytes_by_id, const py::frozenset& hidden, const py::bytes& begun,
                       const py::list& answers) {
  const Spelling spelling(bytes_by_id, hidden);
  const std::string before = begun;
  std::string text;
  py::list texts(answers.size());
  for (size_t i = 0; i < answers.size(); ++i) {
    const py::object tokens = owned(PySequence_Fast(answers[i].ptr(), "an answer is a sequence of tokens"));
    text = before;
    for (Py_ssize_t t = 0; t < PySequence_Fast_GET_SIZE(tokens.ptr()); ++t)
      spelling.append(PySequence_Fast_GET_ITEM(tokens.ptr(), t), text);
    texts[i] = owned(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  }
  return texts;
}

void quote(std::string_view text, std::string& out) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && c != '"' && c != '\\') {
      out += c;
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else {
      out += "\\u00";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  out += '"';
}

// The shortest digits that are read as the same number, and read as no integer.
void put_number(double number, std::string& out) {
  std::array<char, 32> digits;
  const auto [last, error] = std::to_chars(digits.begin(), digits.end(), number);
  const std::string_view written(digits.data(), last - digits.data());
  out += written;
  if (written.find_first_of(".e") == std::string_view::npos) out += ".0";
}

// A list of JSON with a row for each text: parts[0], its number, parts[1], the text, parts[2], its score,
// parts[3], its other score, parts[4]. Nothing if a score is not finite.
std::optional<py::bytes> write_rows(const py::tuple& parts, int64_t first, const py::list& texts,
                                    const py::list& scores, const py::list& others) {
  check(parts.size() == 5, "a row has five parts around what it tells");
  check(scores.size() == texts.size() && others.size() == texts.size(), "a text has two scores");
  std::array<std::string_view, 5> around;
  for (size_t i = 0; i < around.size(); ++i) around[i] = parts[i].cast<std::string_view>();
  std::string out = "[";
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto score = scores[i].cast<double>(), other = others[i].cast<double>();
    if (!std::isfinite(score) || !std::isfinite(other)) return std::nullopt;
    if (i > 0) out += ',';
    out += around[0];
    out += std::to_string(first + static_cast<int64_t>(i));
    out += around[1];
    quote(texts[i].cast<std::string_view>(), out);
    out += around[2];
    put_number(score, out);
    out += around[3];
    put_number(other, out);
    out += around[4];
  }
  out += ']';
  return py::bytes(out);
}

}  // namespace

void bind_answers(py::module_& m) {
  m.def("spell_answers", &spell_answers, py::arg("bytes_by_id"), py::arg("hidden"), py::arg("begun"),
        py::arg("answers"));
  m.def("write_rows", &write_rows, py::arg("parts"), py::arg("first"), py::arg("texts"), py::arg("scores"),
        py::arg("others"));
}

}  // namespace bequest
