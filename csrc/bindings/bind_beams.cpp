// Catalogues, and the candidates of beam search.
#include <pybind11/numpy.h>

#include <memory>
#include <span>

#include "bindings/tensors.h"
#include "core/check.h"
#include "ops/catalogue.h"
#include "ops/cpu/beam_candidates.h"
#ifdef BEQUEST_WITH_CUDA
#include "ops/cuda/beam_candidates.h"
#include "ops/cuda/follow_beams.h"
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
                 CatalogueItems{pointer<int32_t>(tokens), pointer<int64_t>(offsets), num_items, width},
                 vocab_size, num_threads);
           }),
           py::arg("tokens"), py::arg("offsets"), py::arg("num_items"), py::arg("width"),
           py::arg("vocab_size"), py::arg("num_threads"))
      .def("child", &Catalogue::child, py::arg("node"), py::arg("token"))
      .def("child_of_each", py::vectorize(&Catalogue::child), py::arg("nodes"), py::arg("tokens"))
      .def(
          "children",
          [](const py::object& self, int32_t node) {
            return view_of(self, self.cast<const Catalogue&>().children(node));
          },
          py::arg("node"))
      .def("is_terminal", &Catalogue::is_terminal, py::arg("node"))
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

// What a step says of its beams: ops/beam_candidates.h.
struct BeamStep {
  const float* cumulative;     // [R]
  const int32_t* nodes;        // [R], or null
  const int32_t* group_start;  // [G + 1]
  const BeamGroup* groups;     // [G]
  int64_t num_groups;          // G
};

#ifdef BEQUEST_WITH_CUDA
// What beams that follow the step before read and write: ops/cuda/follow_beams.h.
struct BeamsFollowed {
  const cuda::BeamFollower* followers;  // [F]
  int64_t num_followers;                // F
  const int32_t* nodes_before;          // [R of the step before], or null
  float* scores;                        // [R]
  int32_t* nodes;                       // [R], or null
  int32_t* input_ids;                   // [T]
  int32_t* copies;                      // [C, 2]
};
#endif

}  // namespace

template <>
inline constexpr auto fields_of<BeamStep> =
    std::tuple(&BeamStep::cumulative, &BeamStep::nodes, &BeamStep::group_start, &BeamStep::groups,
               &BeamStep::num_groups);
template <>
inline constexpr auto fields_of<BeamOutput> =
    std::tuple(&BeamOutput::score, &BeamOutput::row, &BeamOutput::token, &BeamOutput::logprob,
               &BeamOutput::bad, &BeamOutput::columns);

#ifdef BEQUEST_WITH_CUDA
template <>
inline constexpr auto fields_of<BeamsFollowed> = std::tuple(
    &BeamsFollowed::followers, &BeamsFollowed::num_followers, &BeamsFollowed::nodes_before,
    &BeamsFollowed::scores, &BeamsFollowed::nodes, &BeamsFollowed::input_ids, &BeamsFollowed::copies);
#endif

void bind_beams(py::module_& m) {
  bind_catalogue(m);
  m.attr("beam_group_bytes") = sizeof(BeamGroup);
  m.attr("max_beam_candidates") = kMaxBeamCandidates;
  m.def(
      "beam_candidates",
      [](const Logits& logits, const BeamStep& step, const BeamOutput& out) {
        check(logits.dtype == DType::kF32, "beams: logits are float32");
        beam_candidates({.logits = static_cast<const float*>(logits.data),
                         .stride = logits.stride,
                         .vocab_size = logits.vocab_size,
                         .cumulative = step.cumulative,
                         .nodes = step.nodes,
                         .group_start = step.group_start,
                         .groups = step.groups,
                         .num_groups = step.num_groups,
                         .out = out});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("logits"), py::arg("step"), py::arg("out"));
#ifdef BEQUEST_WITH_CUDA
  m.attr("cuda_max_beam_rows") = cuda::kMaxBeamRows;
  m.def("cuda_beam_workspace_bytes", &cuda::beam_workspace_bytes, py::arg("num_rows"), py::arg("num_slots"));
  m.def(
      "cuda_beam_candidates",
      [](const Logits& logits, const BeamStep& step, Address workspace, const BeamOutput& out,
         Address stream) {
        cuda::beam_candidates({.logits = logits.data,
                               .dtype = logits.dtype,
                               .stride = logits.stride,
                               .vocab_size = logits.vocab_size,
                               .num_rows = logits.num,
                               .cumulative = step.cumulative,
                               .nodes = step.nodes,
                               .group_start = step.group_start,
                               .groups = step.groups,
                               .num_groups = step.num_groups,
                               .workspace = pointer<void>(workspace),
                               .out = out},
                              pointer<CUstream_st>(stream));
      },
      py::arg("logits"), py::arg("step"), py::arg("workspace"), py::arg("out"), py::arg("stream"));
  m.attr("cuda_beam_follower_bytes") = sizeof(cuda::BeamFollower);
  m.def(
      "cuda_follow_beams",
      [](const BeamOutput& before, Address groups, const BeamsFollowed& of, Address stream) {
        cuda::follow_beams({.before = before,
                            .nodes_before = of.nodes_before,
                            .groups = pointer<BeamGroup>(groups),
                            .followers = of.followers,
                            .num_followers = of.num_followers,
                            .scores = of.scores,
                            .nodes = of.nodes,
                            .input_ids = of.input_ids,
                            .copies = of.copies},
                           pointer<CUstream_st>(stream));
      },
      py::arg("before"), py::arg("groups"), py::arg("of"), py::arg("stream"));
#endif
}

}  // namespace bequest
