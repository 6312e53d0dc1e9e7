#include "bindings/expert_structs.h"
#include "bindings/tensors.h"
#include "ops/cpu/expert_route.h"
#include "ops/cpu/experts.h"
#include "ops/cpu/weighted_rows.h"

namespace py = pybind11;

namespace bequest {

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_experts(py::module_& m) {
  py::class_<ExpertMatrices>(m, "PackedExperts")
      .def(py::init([](const PackedMatrix& first, int64_t stride, int64_t num_experts, Address bias) {
             return ExpertMatrices{static_cast<const char*>(first.data),
                                   stride,
                                   num_experts,
                                   first.format,
                                   pointer<const float>(bias),
                                   first.out_features,
                                   first.in_features};
           }),
           py::arg("first"), py::arg("stride"), py::arg("num_experts"), py::arg("bias"))
      .def_readwrite("site", &ExpertMatrices::site);
  m.def(
      "route_experts",
      [](const Rows& logits, const RoutingRule& rule, Address ids, Address weights) {
        route(
            {logits.data, logits.count, logits.stride, rule, pointer<int32_t>(ids), pointer<float>(weights)});
      },
      Unlocked(), py::arg("logits"), py::arg("rule"), py::arg("ids"), py::arg("weights"));
  m.def(
      "expert_gated",
      [](const ExpertMatrices& gate_up, const ChosenExperts& chosen, Address x, int activation, Address out) {
        expert_gated(gate_up, chosen, pointer<float>(x), Activation(activation), pointer<float>(out));
      },
      Unlocked(), py::arg("gate_up"), py::arg("chosen"), py::arg("x"), py::arg("activation"), py::arg("out"));
  m.def(
      "expert_summed",
      [](const ExpertMatrices& down, const ChosenExperts& chosen, Address x, Address out) {
        expert_summed(down, chosen, pointer<float>(x), pointer<float>(out));
      },
      Unlocked(), py::arg("down"), py::arg("chosen"), py::arg("x"), py::arg("out"));
  m.def(
      "add_gated_rows",
      [](const Rows& rows, Address gates, Address weights, Address out) {
        make_gates(pointer<float>(gates), pointer<float>(weights), rows.count);
        add_weighted_rows({rows.data, nullptr, pointer<float>(weights), pointer<float>(out), rows.count, 1,
                           rows.stride, true});
      },
      Unlocked(), py::arg("rows"), py::arg("gates"), py::arg("weights"), py::arg("out"));
}

}  // namespace bequest
