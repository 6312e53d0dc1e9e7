// Events of streams, those of a step in one call: each is a token's text between two constants, and goes to a
// transport of Python's event loop. Owned by the thread of that loop.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/progress.h"
#include "core/check.h"

namespace py = pybind11;

namespace bequest {
namespace {

// The texts of tokens as events have them, asked for once each.
class TokenTexts {
 public:
  explicit TokenTexts(py::function spell) : spell_(std::move(spell)) {}

  // Empty: the token has no text of its own.
  std::string_view find(size_t token) {
    if (token >= texts_.size()) texts_.resize(std::max(token + 1, 2 * texts_.size()));
    std::optional<std::string>& text = texts_[token];
    if (!text) text = spell_(token).cast<std::string>();
    return *text;
  }

 private:
  py::function spell_;
  std::vector<std::optional<std::string>> texts_;
};

// Where the events of one stream go while nothing else is to be told and the client takes them.
class Outlet {
 public:
  Outlet(std::string head, std::string tail) : head_(std::move(head)), tail_(std::move(tail)) {}

  // `protocol` tells whether writing is paused, `transport` whether it closes.
  void open(const py::object& transport, const py::object& protocol, bool chunked) {
    write_ = transport.attr("write");
    is_closing_ = transport.attr("is_closing");
    protocol_ = protocol;
    chunked_ = chunked;
  }

  // The connection is let go, too: it may refer to whoever holds this.
  void close() { write_ = is_closing_ = protocol_ = py::object(); }

  bool is_open() const { return static_cast<bool>(write_); }

  int64_t num_written() const { return num_written_; }

  bool try_write(std::string_view text) {
    if (!is_open() || blocked()) return false;
    const py::object write = write_;  // what is called may close this
    const py::bytes bytes = event(text);
    if (!py::reinterpret_steal<py::object>(PyObject_CallOneArg(write.ptr(), bytes.ptr())))
      throw py::error_already_set();
    ++num_written_;
    return true;
  }

 private:
  bool blocked() const {
    static PyObject* const paused = PyUnicode_InternFromString("writing_paused");
    const auto is_paused = py::reinterpret_steal<py::object>(PyObject_GetAttr(protocol_.ptr(), paused));
    if (!is_paused) throw py::error_already_set();
    const auto closing = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(is_closing_.ptr()));
    if (!closing) throw py::error_already_set();
    return is_paused.ptr() != Py_False || closing.ptr() != Py_False;
  }

  // A chunk of HTTP/1.1, where there are chunks: its length in hexadecimal, and a line's end behind both.
  py::bytes event(std::string_view text) const {
    constexpr std::string_view kEnd = "\r\n";
    std::array<char, 16> digits;
    const size_t body = head_.size() + text.size() + tail_.size();
    const auto [last, error] = std::to_chars(digits.begin(), digits.end(), body, 16);
    const std::string_view length(digits.data(), last - digits.data());
    const size_t around = chunked_ ? length.size() + 2 * kEnd.size() : 0;
    auto bytes = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(body + around)));
    if (!bytes) throw py::error_already_set();
    char* out = PyBytes_AS_STRING(bytes.ptr());
    const auto put = [&out](std::string_view part) {
      std::memcpy(out, part.data(), part.size());
      out += part.size();
    };
    if (chunked_) put(length), put(kEnd);
    put(head_), put(text), put(tail_);
    if (chunked_) put(kEnd);
    return bytes;
  }

  std::string head_, tail_;
  py::object write_, is_closing_, protocol_;  // null: it is closed
  bool chunked_ = false;
  int64_t num_written_ = 0;
};

// Writes each token's event to the outlet of its sequence. Returns the numbers of those that have to be told
// in another way.
py::list pass_on(TokenTexts& texts, const py::list& sequences, const py::list& tokens) {
  py::list left;
  const Sequences all(sequences);
  check(all.size() == static_cast<ssize_t>(tokens.size()), "each token has a sequence");
  for (ssize_t i = 0; i < all.size(); ++i) {
    const std::string_view text = texts.find(py::cast<size_t>(tokens[i]));
    const py::handle outlet = all[i].second.outlet;
    bool written = false;
    try {
      written = !text.empty() && is_set(outlet.ptr()) && outlet.cast<Outlet&>().try_write(text);
    } catch (const py::error_already_set&) {
      // The other way meets the same error, and says whose it is.
    }
    if (!written) left.append(i);
  }
  return left;
}

}  // namespace

void bind_outlets(py::module_& m) {
  py::class_<TokenTexts>(m, "TokenTexts").def(py::init<py::function>(), py::arg("spell"));
  py::class_<Outlet>(m, "Outlet")
      .def(py::init([](const py::bytes& head, const py::bytes& tail) {
             return std::make_unique<Outlet>(std::string(head), std::string(tail));
           }),
           py::arg("head"), py::arg("tail"))
      .def("open", &Outlet::open, py::arg("transport"), py::arg("protocol"), py::arg("chunked"))
      .def("close", &Outlet::close)
      .def_property_readonly("is_open", &Outlet::is_open)
      .def_property_readonly("num_written", &Outlet::num_written);
  m.def("pass_on", &pass_on, py::arg("texts"), py::arg("sequences"), py::arg("tokens"));
}

}  // namespace bequest
