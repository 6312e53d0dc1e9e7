#include "bindings/bindings.h"

#ifdef BEQUEST_WITH_CUDA

#include "bindings/cuda_tensors.h"
#include "ops/cuda/lora.h"

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<cuda::LoraTiles> =
    std::tuple(&cuda::LoraTiles::rows, &cuda::LoraTiles::tiles, &cuda::LoraTiles::num_tiles);

// A product's slots are made once: they are an object.
void bind_cuda_lora(py::module_& m) {
  py::class_<cuda::LoraSite>(m, "CudaLoraSite")
      .def(py::init([](const std::tuple<Address, Address>& matrices,
                       const std::tuple<Address, Address, Address>& parts,
                       const std::tuple<int64_t, int64_t, int64_t, int64_t>& sizes) {
             const auto [a, b] = matrices;
             const auto [ranks, scales, ends] = parts;
             const auto [num_parts, most_rank, in_features, out_features] = sizes;
             return cuda::LoraSite{.a = pointer<const void>(a),
                                   .b = pointer<const void>(b),
                                   .ranks = pointer<const int32_t>(ranks),
                                   .scales = pointer<const float>(scales),
                                   .ends = pointer<const int32_t>(ends),
                                   .num_parts = num_parts,
                                   .most_rank = most_rank,
                                   .in_features = in_features,
                                   .out_features = out_features};
           }),
           py::arg("matrices"), py::arg("parts"), py::arg("sizes"));
  m.def(
      "cuda_add_lora",
      [](Address x, Address y, Address shrunk, const cuda::LoraSite& site, const cuda::LoraTiles& tiles,
         Address stream) {
        cuda::add_lora({.x = pointer<const void>(x),
                        .y = pointer<void>(y),
                        .shrunk = pointer<float>(shrunk),
                        .site = site,
                        .tiles = tiles},
                       stream_of(stream));
      },
      py::arg("x"), py::arg("y"), py::arg("shrunk"), py::arg("site"), py::arg("tiles"), py::arg("stream"));
}

}  // namespace bequest

#endif
