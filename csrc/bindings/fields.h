// Structs as arguments. Python passes a small struct as a tuple of its fields: a tuple of numbers is made and
// read in a fraction of the time that an object takes, and a step makes hundreds of calls. What outlives a
// call (a packed weight, a cache, a plan) is an object instead.
#pragma once

#include <pybind11/stl.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "bindings/bindings.h"

namespace bequest {

// The fields of a struct that Python passes as a tuple, in the tuple's order.
template <class T>
inline constexpr auto fields_of = nullptr;

template <class T>
concept HasFields = !std::is_null_pointer_v<std::remove_cv_t<decltype(fields_of<T>)>>;

// How many of the last fields may be left out; they are then zero.
template <class T>
inline constexpr ssize_t optional_fields = 0;

// A field is a number, an address (0: null), the code of an enum, an object, or a struct again.
template <class T>
bool load_field(pybind11::handle source, bool convert, T& field) {
  using Passed =
      std::conditional_t<std::is_pointer_v<T>, Address, std::conditional_t<std::is_enum_v<T>, int, T>>;
  pybind11::detail::make_caster<Passed> caster;
  if (!caster.load(source, convert)) return false;
  if constexpr (std::is_pointer_v<T>) {
    field = reinterpret_cast<T>(pybind11::detail::cast_op<Address>(caster));
  } else if constexpr (std::is_enum_v<T>) {
    field = static_cast<T>(pybind11::detail::cast_op<int>(caster));
  } else {
    field = pybind11::detail::cast_op<T>(std::move(caster));
  }
  return true;
}

}  // namespace bequest

namespace pybind11::detail {

template <bequest::HasFields T>
class type_caster<T> {
 public:
  static constexpr auto name = const_name("tuple");

  bool load(handle source, bool convert) {
    return std::apply([&](auto... fields) { return load_all(source.ptr(), convert, fields...); },
                      bequest::fields_of<T>);
  }

  operator T&() { return value_; }
  operator T&&() && { return std::move(value_); }
  template <class U>
  using cast_op_type = movable_cast_op_type<U>;

 private:
  template <class... Fields>
  bool load_all(PyObject* tuple, bool convert, Fields... fields) {
    if (!PyTuple_Check(tuple)) return false;
    const ssize_t size = PyTuple_GET_SIZE(tuple), most = sizeof...(fields);
    if (size > most || size < most - bequest::optional_fields<T>) return false;
    ssize_t i = 0;
    const auto load = [&](auto field) {
      return i == size || bequest::load_field(PyTuple_GET_ITEM(tuple, i++), convert, value_.*field);
    };
    return (load(fields) && ...);
  }

  T value_{};
};

}  // namespace pybind11::detail
