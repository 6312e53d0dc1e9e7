// Answers that are told whole: the texts of several in one call, and rows of JSON that have them. A search
// has as many choices as other requests have tokens. Owned by the thread of the event loop.
#include <algorithm>
#include <array>
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
  size_t written = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
    out += text.substr(written, i - written);
    written = i + 1;
    if (byte >= 0x20) {
      out += '\\';
      out += text[i];
    } else {
      out += "\\u00";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  out += text.substr(written);
  out += '"';
}

std::string_view text_of(const py::list& texts, size_t i) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(PyList_GET_ITEM(texts.ptr(), i), &size);
  if (data == nullptr) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

// The numbers of a list of JSON that has no white space, one after the other.
class Numbers {
 public:
  explicit Numbers(const py::bytes& list) : rest_(list) {
    check(rest_.starts_with('[') && rest_.ends_with(']'), "numbers are a list of JSON");
    rest_ = rest_.substr(1, rest_.size() - 2);
  }

  std::string_view next() {
    check(!rest_.empty(), "a text has two scores");
    const size_t end = std::min(rest_.find(','), rest_.size());
    const std::string_view number = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    return number;
  }

  bool done() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

// A list of JSON with a row for each text: parts[0], its number, parts[1], the text, parts[2], its score,
// parts[3], its other score, parts[4]. Scores are lists of JSON already.
py::bytes write_rows(const py::tuple& parts, const py::list& texts, const py::bytes& scores,
                     const py::bytes& others) {
  check(parts.size() == 5, "a row has five parts around what it tells");
  Numbers first(scores), second(others);
  std::array<std::string_view, 5> around;
  size_t usual = 64;  // bytes of a row, a short text among them
  for (size_t i = 0; i < around.size(); ++i) {
    around[i] = parts[i].cast<std::string_view>();
    usual += around[i].size();
  }
  std::string out = "[";
  out.reserve(usual * texts.size() + 2);
  for (size_t i = 0; i < texts.size(); ++i) {
    if (i > 0) out += ',';
    out += around[0];
    out += std::to_string(i);
    out += around[1];
    quote(text_of(texts, i), out);
    out += around[2];
    out += first.next();
    out += around[3];
    out += second.next();
    out += around[4];
  }
  check(first.done() && second.done(), "a text has two scores");
  out += ']';
  return py::bytes(out);
}

}  // namespace

void bind_answers(py::module_& m) {
  m.def("spell_answers", &spell_answers, py::arg("bytes_by_id"), py::arg("hidden"), py::arg("begun"),
        py::arg("answers"));
  m.def("write_rows", &write_rows, py::arg("parts"), py::arg("texts"), py::arg("scores"), py::arg("others"));
}

}  // namespace bequest
