#include "bindings/cuda_tensors.h"
#include "ops/cuda/expert_linear.h"
#include "ops/cuda/expert_route.h"

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<cuda::ExpertSizes> = std::tuple(
    &cuda::ExpertSizes::num_tokens, &cuda::ExpertSizes::num_chosen, &cuda::ExpertSizes::num_experts);
template <>
inline constexpr auto fields_of<cuda::ExpertRouting> =
    std::tuple(&cuda::ExpertRouting::scoring, &cuda::ExpertRouting::bias, &cuda::ExpertRouting::num_groups,
               &cuda::ExpertRouting::top_groups, &cuda::ExpertRouting::group_best,
               &cuda::ExpertRouting::renormalises, &cuda::ExpertRouting::factor);
template <>
inline constexpr auto fields_of<cuda::ExpertMatrices> = std::tuple(
    &cuda::ExpertMatrices::weight, &cuda::ExpertMatrices::bias, &cuda::ExpertMatrices::out_features,
    &cuda::ExpertMatrices::in_features, &cuda::ExpertMatrices::dtype, &cuda::ExpertMatrices::is_fresh);

namespace {

// Where a choice lies, for the kernel that makes it and for those that read it.
struct ChoicePlaces {
  int32_t* ids;
  float* weights;
  void* plan;
  cuda::ExpertSizes sizes;

  operator cuda::ExpertChoice() const { return {ids, weights, plan, sizes}; }
};

}  // namespace

template <>
inline constexpr auto fields_of<ChoicePlaces> =
    std::tuple(&ChoicePlaces::ids, &ChoicePlaces::weights, &ChoicePlaces::plan, &ChoicePlaces::sizes);

namespace {

void bind_products_of_pairs(py::module_& m) {
  m.def("cuda_has_expert_tiles", &cuda::has_expert_tiles, py::arg("outputs"), py::arg("in_features"));
  m.def(
      "cuda_expert_products",
      [](Address x, const cuda::ExpertMatrices& matrices, const ChoicePlaces& choice, bool shares_rows,
         Address out, Address stream) {
        cuda::expert_products({.x = pointer<void>(x),
                               .matrices = matrices,
                               .choice = choice,
                               .shares_rows = shares_rows,
                               .out = pointer<void>(out)},
                              stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("choice"), py::arg("shares_rows"), py::arg("out"),
      py::arg("stream"));
  m.def(
      "cuda_sum_expert_products",
      [](Address products, int64_t columns, int dtype, const ChoicePlaces& choice, Address out,
         Address stream) {
        cuda::sum_expert_products({.products = pointer<void>(products),
                                   .columns = columns,
                                   .dtype = DType(dtype),
                                   .choice = choice,
                                   .out = pointer<void>(out)},
                                  stream_of(stream));
      },
      py::arg("products"), py::arg("columns"), py::arg("dtype"), py::arg("choice"), py::arg("out"),
      py::arg("stream"));
  m.def(
      "cuda_has_fine_expert_tiles",
      [](const cuda::FineMatrices& matrices, const cuda::ExpertSizes& sizes) {
        return cuda::has_fine_expert_tiles(matrices, sizes);
      },
      py::arg("matrices"), py::arg("sizes"));
  m.def(
      "cuda_fine_expert_gated",
      [](const FineRows& rows, const cuda::FineMatrices& matrices, Address bias, const ChoicePlaces& choice,
         int activation, Address stream) {
        cuda::fine_expert_gated(rows.with(matrices, bias), choice, Activation(activation), stream_of(stream));
      },
      py::arg("rows"), py::arg("matrices"), py::arg("bias"), py::arg("choice"), py::arg("activation"),
      py::arg("stream"));
  m.def(
      "cuda_fine_expert_linear",
      [](const FineRows& rows, const cuda::FineMatrices& matrices, Address bias, const ChoicePlaces& choice,
         bool shared, Address stream) {
        cuda::fine_expert_linear(rows.with(matrices, bias), choice, shared, stream_of(stream));
      },
      py::arg("rows"), py::arg("matrices"), py::arg("bias"), py::arg("choice"), py::arg("shared"),
      py::arg("stream"));
}

}  // namespace

void bind_cuda_experts(py::module_& m) {
  bind_products_of_pairs(m);
  m.def(
      "cuda_expert_plan_bytes", [](const cuda::ExpertSizes& sizes) { return cuda::expert_plan_bytes(sizes); },
      py::arg("sizes"));
  m.def(
      "cuda_route_experts",
      [](Address logits, int dtype, const cuda::ExpertRouting& routing, const ChoicePlaces& choice,
         Address num_read, Address stream) {
        cuda::route_experts({.logits = pointer<void>(logits),
                             .dtype = DType(dtype),
                             .sizes = choice.sizes,
                             .routing = routing,
                             .ids = choice.ids,
                             .weights = choice.weights,
                             .plan = choice.plan,
                             .num_read = pointer<uint64_t>(num_read)},
                            stream_of(stream));
      },
      py::arg("logits"), py::arg("dtype"), py::arg("routing"), py::arg("choice"), py::arg("num_read"),
      py::arg("stream"));
  m.def(
      "cuda_expert_gated",
      [](Address x, const cuda::ExpertMatrices& matrices, const ChoicePlaces& choice, int activation,
         Address out, Address stream) {
        cuda::expert_gated({.x = pointer<void>(x),
                            .matrices = matrices,
                            .choice = choice,
                            .activation = Activation(activation),
                            .out = pointer<void>(out)},
                           stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("choice"), py::arg("activation"), py::arg("out"),
      py::arg("stream"));
  m.def(
      "cuda_expert_summed",
      [](Address x, const cuda::ExpertMatrices& matrices, const ChoicePlaces& choice, Address products,
         Address out, Address stream) {
        cuda::expert_summed({.x = pointer<void>(x),
                             .matrices = matrices,
                             .choice = choice,
                             .products = pointer<void>(products),
                             .out = pointer<void>(out)},
                            stream_of(stream));
      },
      py::arg("x"), py::arg("matrices"), py::arg("choice"), py::arg("products"), py::arg("out"),
      py::arg("stream"));
}

}  // namespace bequest
