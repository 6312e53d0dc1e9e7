#include <pybind11/stl.h>

#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/adapters.h"
#include "bindings/expert_structs.h"
#include "bindings/tensors.h"
#include "model/cpu/adapted_experts.h"

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<LoraPart> =
    std::tuple(&LoraPart::a, &LoraPart::b, &LoraPart::rank, &LoraPart::first_column, &LoraPart::num_columns,
               &LoraPart::scale);

namespace {

using Rows = std::pair<const Adapter*, std::vector<int64_t>>;

StepAdapters step_adapters(const std::vector<Rows>& rows) {
  std::vector<StepAdapters::Group> groups;
  for (const auto& [adapter, numbers] : rows) groups.push_back({adapter, numbers});
  return StepAdapters(std::move(groups));
}

}  // namespace

void bind_adapters(pybind11::module_& m) {
  py::class_<Adapter>(m, "Adapter")
      .def(py::init(
          [](const std::unordered_map<int64_t, std::vector<LoraPart>>& sites) { return Adapter(sites); }));
  py::class_<StepAdapters>(m, "StepAdapters")
      .def(py::init(&step_adapters))
      .def("rows_at",
           [](const StepAdapters& adapters, int64_t site) {
             std::vector<int64_t> rows;
             for (const LoraRows& group : adapters.at(site))
               rows.insert(rows.end(), group.rows, group.rows + group.num_rows);
             return rows;
           })
      .def("is_among", [](const StepAdapters& adapters, int64_t first_up,
                          int64_t first_down) { return !adapters.among(first_up, first_down).empty(); })
      .def(
          "experts",
          [](const StepAdapters& adapters, const std::pair<ExpertMatrices, ExpertMatrices>& up_and_down,
             const ChosenExperts& chosen, Address x, int activation, Address out) {
            experts_with_adapters({pointer<const float>(x), up_and_down.first, Activation(activation),
                                   up_and_down.second, chosen, pointer<float>(out)},
                                  adapters);
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "add",
          [](const StepAdapters& adapters, int64_t site, Address x, int64_t in_features, Address y,
             int64_t out_features) {
            add_lora({pointer<const float>(x), pointer<float>(y), in_features, out_features, in_features,
                      adapters.at(site)});
          },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace bequest
