#include <algorithm>
#include <vector>

#include "bindings/cuda_tensors.h"
#include "ops/cuda/lora.h"

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<cuda::LoraTiles> =
    std::tuple(&cuda::LoraTiles::rows, &cuda::LoraTiles::tiles, &cuda::LoraTiles::most_tiles,
               &cuda::LoraTiles::rows_of_x, &cuda::LoraTiles::made_in_step);

// A product's slots are made once: they are an object.
cuda::LoraSite make_site(const std::tuple<Address, Address, Address, Address, Address>& slots,
                         const std::vector<int32_t>& ends,
                         const std::tuple<int64_t, int64_t, int64_t, int64_t, int>& sizes) {
  const auto [a, b, ranks, scales, counts] = slots;
  const auto [num_slots, most_rank, in_features, out_features, dtype] = sizes;
  check(!ends.empty() && ends.size() <= cuda::kMostLoraParts, "a site of adapters: parts");
  cuda::LoraSite site{.a = pointer<const void>(a),
                      .b = pointer<const void>(b),
                      .ranks = pointer<const int32_t>(ranks),
                      .scales = pointer<const float>(scales),
                      .counts = pointer<int32_t>(counts),
                      .ends = {},
                      .num_slots = num_slots,
                      .num_parts = static_cast<int64_t>(ends.size()),
                      .most_rank = most_rank,
                      .in_features = in_features,
                      .out_features = out_features,
                      .dtype = DType(dtype)};
  std::ranges::copy(ends, site.ends);
  return site;
}

cuda::LoraAddParams added(const std::tuple<Address, Address, Address, bool>& arrays, int64_t num_rows,
                          const cuda::LoraSite& site, const cuda::LoraTiles& tiles) {
  const auto [x, y, shrunk, stores] = arrays;
  return {.x = pointer<const void>(x),
          .y = pointer<void>(y),
          .shrunk = pointer<float>(shrunk),
          .num_rows = num_rows,
          .stores = stores,
          .site = site,
          .tiles = tiles};
}

void bind_cuda_lora(py::module_& m) {
  py::class_<cuda::LoraSite>(m, "CudaLoraSite")
      .def(py::init(&make_site), py::arg("slots"), py::arg("ends"), py::arg("sizes"));
  m.def(
      "cuda_lora_add",
      [](const std::tuple<Address, Address, Address, bool>& arrays, int64_t num_rows,
         const cuda::LoraSite& site, const cuda::LoraTiles& tiles,
         Address stream) { cuda::lora_add(added(arrays, num_rows, site, tiles), stream_of(stream)); },
      py::arg("arrays"), py::arg("num_rows"), py::arg("site"), py::arg("tiles"), py::arg("stream"));
  m.def(
      "cuda_lora_expand",
      [](const std::tuple<Address, Address, Address, bool>& arrays, int64_t num_rows,
         const cuda::LoraSite& site, const cuda::LoraTiles& tiles,
         Address stream) { cuda::lora_expand(added(arrays, num_rows, site, tiles), stream_of(stream)); },
      py::arg("arrays"), py::arg("num_rows"), py::arg("site"), py::arg("tiles"), py::arg("stream"));
  m.def(
      "cuda_lora_expert_tiles",
      [](Address slots, Address ids, const std::tuple<int64_t, int64_t, int64_t, int64_t>& sizes,
         Address places, const std::pair<Address, Address>& rows_and_tiles, Address stream) {
        const auto [num_tokens, num_chosen, num_experts, num_slots] = sizes;
        cuda::lora_expert_tiles({.slots = pointer<const int32_t>(slots),
                                 .ids = pointer<const int32_t>(ids),
                                 .num_tokens = num_tokens,
                                 .num_chosen = num_chosen,
                                 .num_experts = num_experts,
                                 .num_slots = num_slots,
                                 .places = pointer<int32_t>(places),
                                 .rows = pointer<int32_t>(rows_and_tiles.first),
                                 .tiles = pointer<int32_t>(rows_and_tiles.second)},
                                stream_of(stream));
      },
      py::arg("slots"), py::arg("ids"), py::arg("sizes"), py::arg("places"), py::arg("rows_and_tiles"),
      py::arg("stream"));
}

}  // namespace bequest
