// Progress as a type of Python's. Made by the C API: a member of pybind11's costs a call, and these are read
// in every step.
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <array>
#include <cstddef>

#include "bindings/progress.h"
#include "cache/batch.h"

namespace py = pybind11;

namespace bequest {
namespace {

PyTypeObject* progress_type = nullptr;

constexpr Py_ssize_t at(size_t offset) { return static_cast<Py_ssize_t>(offset); }

std::array<PyMemberDef, 20> members{{
    {"tokens", T_OBJECT_EX, at(offsetof(Progress, tokens)), 0, nullptr},
    {"table", T_OBJECT_EX, at(offsetof(Progress, table)), 0, nullptr},
    {"status", T_OBJECT_EX, at(offsetof(Progress, status)), 0, nullptr},
    {"ends", T_OBJECT, at(offsetof(Progress, ends)), 0, nullptr},
    {"outlet", T_OBJECT, at(offsetof(Progress, outlet)), 0, nullptr},
    {"matcher", T_OBJECT, at(offsetof(Progress, matcher)), 0, nullptr},
    {"account", T_OBJECT_EX, at(offsetof(Progress, account)), 0, nullptr},
    {"num_prompt", T_LONGLONG, at(offsetof(Progress, num_prompt)), 0, nullptr},
    {"num_computed", T_LONGLONG, at(offsetof(Progress, num_computed)), 0, nullptr},
    {"num_in_flight", T_LONGLONG, at(offsetof(Progress, num_in_flight)), 0, nullptr},
    {"num_output", T_LONGLONG, at(offsetof(Progress, num_output)), 0, nullptr},
    {"planned_len", T_LONGLONG, at(offsetof(Progress, planned_len)), 0, nullptr},
    {"most_len", T_LONGLONG, at(offsetof(Progress, most_len)), 0, nullptr},
    {"free_until", T_LONGLONG, at(offsetof(Progress, free_until)), 0, nullptr},
    {"row", T_LONGLONG, at(offsetof(Progress, row)), 0, nullptr},
    {"num_logprobs", T_LONGLONG, at(offsetof(Progress, num_logprobs)), 0, nullptr},
    {"adapter", T_LONGLONG, at(offsetof(Progress, adapter)), 0, nullptr},
    {"last_token_at", T_DOUBLE, at(offsetof(Progress, last_token_at)), 0, nullptr},
    {"plain", T_BOOL, at(offsetof(Progress, plain)), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
}};

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);  // all zero
  if (self != nullptr) reinterpret_cast<Progress*>(self)->row = kNoRow;
  if (self != nullptr) reinterpret_cast<Progress*>(self)->num_logprobs = kNoLogprobs;
  return self;
}

// The collector does not look into these members: none of them knows of a sequence, so no cycle leads through
// them. Objects of a heap type hold it.
void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto& p = *reinterpret_cast<Progress*>(self);
  for (PyObject* member : {p.tokens, p.table, p.status, p.ends, p.outlet, p.matcher, p.account})
    Py_XDECREF(member);
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace

Progress& progress_of(py::handle sequence) {
  if (!PyObject_TypeCheck(sequence.ptr(), progress_type)) throw py::type_error("not a sequence");
  return *reinterpret_cast<Progress*>(sequence.ptr());
}

void bind_progress(py::module_& m) {
  static std::array<PyType_Slot, 4> slots{{{Py_tp_new, reinterpret_cast<void*>(make)},
                                           {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                           {Py_tp_members, members.data()},
                                           {0, nullptr}}};
  static PyType_Spec spec{"bequest.engine._C.Progress", sizeof(Progress), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots.data()};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  py::list names;
  for (size_t i = 0; i + 1 < members.size(); ++i) names.append(members[i].name);
  type.attr("__slots__") = py::tuple(names);  // a dataclass with slots makes none for members it finds here
  progress_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
  m.add_object("Progress", type);
}

}  // namespace bequest
