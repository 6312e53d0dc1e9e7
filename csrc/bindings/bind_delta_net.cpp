#include "bindings/fields.h"
#include "ops/cpu/delta_net.h"
#include "ops/cpu/sigmoid_gate.h"

#ifdef BEQUEST_WITH_CUDA
#include "ops/cuda/delta_net.h"
#endif

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<DeltaNetSizes> =
    std::tuple(&DeltaNetSizes::key_heads, &DeltaNetSizes::value_heads, &DeltaNetSizes::key_dim,
               &DeltaNetSizes::value_dim, &DeltaNetSizes::conv_width);

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// What a layer has for itself: ops/cpu/delta_net.h.
struct DeltaNetWeights {
  const float* taps;
  const float* decay;
  const float* step_bias;
  const float* norm;
  float eps;
};

// States of one layer, and who reads and writes which.
struct DeltaNetStates {
  float* data;
  int64_t slot_stride;
  int64_t num_slots;
  const int32_t* starts;
  const int32_t* slots;
};

struct SequenceRows {
  const void* rows;
  int64_t num_tokens;
  const int32_t* query_start;
  int64_t num_sequences;
};

}  // namespace

template <>
inline constexpr auto fields_of<DeltaNetWeights> =
    std::tuple(&DeltaNetWeights::taps, &DeltaNetWeights::decay, &DeltaNetWeights::step_bias,
               &DeltaNetWeights::norm, &DeltaNetWeights::eps);
template <>
inline constexpr auto fields_of<DeltaNetStates> =
    std::tuple(&DeltaNetStates::data, &DeltaNetStates::slot_stride, &DeltaNetStates::num_slots,
               &DeltaNetStates::starts, &DeltaNetStates::slots);
template <>
inline constexpr auto fields_of<SequenceRows> = std::tuple(
    &SequenceRows::rows, &SequenceRows::num_tokens, &SequenceRows::query_start, &SequenceRows::num_sequences);

#ifdef BEQUEST_WITH_CUDA
namespace {

// Launches are too short to be worth releasing the GIL. `to`: the address of what comes out, and the code of
// its dtype and the rows'; whether no sequence has more than one token; and the scratch.
void bind_cuda_delta_net(py::module_& m) {
  m.def(
      "cuda_delta_net",
      [](const DeltaNetSizes& sizes, const SequenceRows& of, const DeltaNetWeights& weights,
         const DeltaNetStates& states, const std::tuple<Address, int, bool, Address>& to, Address stream) {
        const auto& [out, dtype, one_each, scratch] = to;
        cuda::delta_net({.sizes = sizes,
                         .rows = of.rows,
                         .taps = weights.taps,
                         .decay = weights.decay,
                         .step_bias = weights.step_bias,
                         .norm = weights.norm,
                         .eps = weights.eps,
                         .out = pointer<void>(out),
                         .dtype = DType(dtype),
                         .states = states.data,
                         .slot_stride = states.slot_stride,
                         .query_start = of.query_start,
                         .starts = states.starts,
                         .slots = states.slots,
                         .num_sequences = of.num_sequences,
                         .num_tokens = of.num_tokens,
                         .one_each = one_each,
                         .scratch = pointer<float>(scratch)},
                        pointer<CUstream_st>(stream));
      },
      py::arg("sizes"), py::arg("of"), py::arg("weights"), py::arg("states"), py::arg("to"),
      py::arg("stream"));
  m.def("cuda_delta_net_scratch", &cuda::delta_net_scratch, py::arg("sizes"), py::arg("num_tokens"),
        py::arg("one_each"));
  m.def(
      "cuda_sigmoid_gate",
      [](Address x, Address gate, int dtype, int64_t count, Address stream) {
        cuda::sigmoid_gate({pointer<void>(x), pointer<const void>(gate), DType(dtype), count},
                           pointer<CUstream_st>(stream));
      },
      py::arg("x"), py::arg("gate"), py::arg("dtype"), py::arg("count"), py::arg("stream"));
}

}  // namespace
#endif

void bind_delta_net(py::module_& m) {
#ifdef BEQUEST_WITH_CUDA
  bind_cuda_delta_net(m);
#endif
  m.def(
      "delta_net",
      [](const DeltaNetSizes& sizes, const SequenceRows& of, const DeltaNetWeights& weights,
         const DeltaNetStates& states, Address out) {
        delta_net({sizes, static_cast<const float*>(of.rows), weights.taps, weights.decay, weights.step_bias,
                   weights.norm, weights.eps, pointer<float>(out), states.data, states.slot_stride,
                   states.num_slots, of.query_start, states.starts, states.slots, of.num_tokens,
                   of.num_sequences});
      },
      Unlocked(), py::arg("sizes"), py::arg("of"), py::arg("weights"), py::arg("states"), py::arg("out"));
  m.def(
      "sigmoid_gate",
      [](Address x, Address gate, int64_t count) {
        sigmoid_gate({pointer<float>(x), pointer<const float>(gate), count});
      },
      Unlocked(), py::arg("x"), py::arg("gate"), py::arg("count"));
}

}  // namespace bequest
