// Catalogues, and the candidates of beam search.
#include <pybind11/numpy.h>

#include <memory>
#include <span>

#include "bindings/bindings.h"
#include "ops/catalogue.h"
#include "ops/cpu/beam_candidates.h"
#ifdef BEQUEST_WITH_CUDA
#include "ops/cuda/beam_candidates.h"
#endif

namespace py = pybind11;

namespace bequest {
namespace {

// A view of the catalogue's memory, which it keeps alive.
template <class T>
py::array_t<T> view_of(const py::object& owner, std::span<const T> values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data(), owner);
}

void bind_catalogue(py::module_& m) {
  py::class_<Catalogue, std::shared_ptr<Catalogue>>(m, "Catalogue")
      .def(py::init([](Address tokens, Address offsets, int64_t num_items, int64_t width, int32_t vocab_size,
                       int num_threads) {
        const py::gil_scoped_release unlocked;  // not a call_guard, see AttentionPlan
        return std::make_shared<Catalogue>(
            CatalogueItems{pointer<int32_t>(tokens), pointer<int64_t>(offsets), num_items, width}, vocab_size,
            num_threads);
      }))
      .def("child", &Catalogue::child)
      .def("child_of_each", py::vectorize(&Catalogue::child))
      .def("children",
           [](const py::object& self, int32_t node) {
             return view_of(self, self.cast<const Catalogue&>().children(node));
           })
      .def("is_terminal", &Catalogue::is_terminal)
      .def_property_readonly("num_items", &Catalogue::num_items)
      .def_property_readonly("num_bytes", &Catalogue::num_bytes)
      .def_property_readonly("vocab_size", &Catalogue::vocab_size)
      .def_property_readonly(
          "tokens",
          [](const py::object& self) { return view_of(self, self.cast<const Catalogue&>().tokens()); })
      .def_property_readonly(
          "first_child",
          [](const py::object& self) { return view_of(self, self.cast<const Catalogue&>().first_child()); })
      .def_property_readonly("terminal", [](const py::object& self) {
        const auto bits = self.cast<const Catalogue&>().terminal();  // torch has no unsigned words
        return view_of<int32_t>(self, {reinterpret_cast<const int32_t*>(bits.data()), bits.size()});
      });
}

BeamOutput output_at(Address score, Address row, Address token, Address logprob, Address bad,
                     int64_t columns) {
  return {pointer<float>(score),   pointer<int32_t>(row), pointer<int32_t>(token),
          pointer<float>(logprob), pointer<bool>(bad),    columns};
}

}  // namespace

void bind_beams(py::module_& m) {
  bind_catalogue(m);
  m.attr("beam_group_bytes") = sizeof(BeamGroup);
  m.attr("max_beam_candidates") = kMaxBeamCandidates;
  m.def(
      "beam_candidates",
      [](Address logits, int64_t stride, int64_t vocab_size, Address cumulative, Address nodes,
         Address group_start, Address groups, int64_t num_groups, Address score, Address row, Address token,
         Address logprob, Address bad, int64_t columns) {
        beam_candidates({pointer<float>(logits), stride, vocab_size, pointer<float>(cumulative),
                         pointer<int32_t>(nodes), pointer<int32_t>(group_start), pointer<BeamGroup>(groups),
                         num_groups, output_at(score, row, token, logprob, bad, columns)});
      },
      py::call_guard<py::gil_scoped_release>());
#ifdef BEQUEST_WITH_CUDA
  m.attr("cuda_max_beam_rows") = cuda::kMaxBeamRows;
  m.def("cuda_beam_workspace_bytes", &cuda::beam_workspace_bytes);
  m.def("cuda_beam_candidates",
        [](Address logits, int dtype, int64_t stride, int64_t vocab_size, int64_t num_rows,
           Address cumulative, Address nodes, Address group_start, Address groups, int64_t num_groups,
           Address workspace, Address score, Address row, Address token, Address logprob, Address bad,
           int64_t columns, Address stream) {
          cuda::beam_candidates(
              {pointer<void>(logits), DType(dtype), stride, vocab_size, num_rows, pointer<float>(cumulative),
               pointer<int32_t>(nodes), pointer<int32_t>(group_start), pointer<BeamGroup>(groups), num_groups,
               pointer<void>(workspace), output_at(score, row, token, logprob, bad, columns)},
              pointer<CUstream_st>(stream));
        });
#endif
}

}  // namespace bequest
