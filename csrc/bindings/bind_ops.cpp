#include <optional>
#include <utility>

#include "bindings/tensors.h"
#include "ops/cpu/activation.h"
#include "ops/cpu/feed_forward.h"
#include "ops/cpu/gather.h"
#include "ops/cpu/hidden_tap.h"
#include "ops/cpu/linear.h"
#include "ops/cpu/norm.h"
#include "ops/cpu/quantised.h"
#include "ops/cpu/resize.h"
#include "ops/cpu/rope.h"

namespace py = pybind11;

namespace bequest {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;
using Tap = std::optional<HiddenTap>;

// A matrix with the address of its bias [N], or 0.
using Product = std::pair<PackedMatrix, Address>;

void bind_weights(py::module_& m) {
  py::class_<PackedMatrix>(m, "PackedMatrix")
      .def(py::init([](Address data, int format, int64_t out_features, int64_t in_features) {
             return PackedMatrix{pointer<void>(data), WeightFormat(format), out_features, in_features};
           }),
           py::arg("data"), py::arg("format"), py::arg("out_features"), py::arg("in_features"))
      .def(
          "pack",
          [](const PackedMatrix& self, Address rows, int dtype, int64_t first_row, int64_t num_rows) {
            pack_weight({pointer<void>(rows), DType(dtype), self.data, self.format, first_row, num_rows,
                         self.in_features});
          },
          Unlocked(), py::arg("rows"), py::arg("dtype"), py::arg("first_row"), py::arg("num_rows"))
      .def(
          "pack_quantised",
          [](const PackedMatrix& self, Address rows, int stored, int64_t first_row, int64_t num_rows) {
            pack_quantised({pointer<uint8_t>(rows), StoredCodes(stored), self.data, first_row, num_rows,
                            self.in_features});
          },
          Unlocked(), py::arg("rows"), py::arg("stored"), py::arg("first_row"), py::arg("num_rows"));
}

LinearParams product(const Rows& x, const PackedMatrix& weight, Address bias, Address out) {
  return {.x = x.data,
          .weight = weight.data,
          .format = weight.format,
          .bias = pointer<float>(bias),
          .out = pointer<float>(out),
          .num_tokens = x.count,
          .out_features = weight.out_features,
          .in_features = weight.in_features,
          .x_stride = x.stride};
}

void bind_products(py::module_& m) {
  m.def(
      "linear",
      [](const Rows& x, const PackedMatrix& weight, Address bias, Address out) {
        linear(product(x, weight, bias, out));
      },
      Unlocked(), py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"));
  m.def(
      "finished_linear",
      [](const Rows& x, const PackedMatrix& weight, Address bias, Address out, int activation, bool gated) {
        LinearParams params = product(x, weight, bias, out);
        params.finish = gated ? Finish::kGated : Finish::kActivated;
        params.activation = Activation(activation);
        linear(params);
      },
      Unlocked(), py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"), py::arg("activation"),
      py::arg("gated"));
  m.def(
      "feed_forward",
      [](const Rows& x, const Product& up, const Product& down, Address out, int activation, bool gated) {
        feed_forward({.x = x.data,
                      .up = up.first.data,
                      .up_bias = pointer<float>(up.second),
                      .down = down.first.data,
                      .down_bias = pointer<float>(down.second),
                      .out = pointer<float>(out),
                      .num_tokens = x.count,
                      .in_features = up.first.in_features,
                      .inner_features = down.first.in_features,
                      .out_features = down.first.out_features,
                      .activation = Activation(activation),
                      .gated = gated});
      },
      Unlocked(), py::arg("x"), py::arg("up"), py::arg("down"), py::arg("out"), py::arg("activation"),
      py::arg("gated"));
  m.def(
      "gather_rows",
      [](Address ids, int64_t num_tokens, const PackedMatrix& weight, Address out) {
        gather_rows({pointer<int32_t>(ids), weight.data, weight.format, pointer<float>(out), num_tokens,
                     weight.out_features, weight.in_features});
      },
      Unlocked(), py::arg("ids"), py::arg("num_tokens"), py::arg("weight"), py::arg("out"));
}

void bind_norms(py::module_& m) {
  m.def(
      "rms_norm",
      [](const Rows& x, const Norm& norm, Address residual, Address out, const Tap& tap) {
        rms_norm({x.data, pointer<float>(residual), static_cast<const float*>(norm.weight),
                  pointer<float>(out), x.count, x.stride, norm.eps, tap.value_or(HiddenTap{})});
      },
      Unlocked(), py::arg("x"), py::arg("norm"), py::arg("residual"), py::arg("out"), py::arg("tap"));
  m.def(
      "layer_norm",
      [](const Rows& x, const Norm& norm, Address residual, Address out, const Tap& tap) {
        layer_norm({x.data, pointer<float>(residual), static_cast<const float*>(norm.weight),
                    static_cast<const float*>(norm.bias), pointer<float>(out), x.count, x.stride, norm.eps,
                    tap.value_or(HiddenTap{})});
      },
      Unlocked(), py::arg("x"), py::arg("norm"), py::arg("residual"), py::arg("out"), py::arg("tap"));
  m.def(
      "tap_rows", [](const Rows& x, const HiddenTap& tap) { tap_rows(x.data, x.count, x.stride, tap); },
      Unlocked(), py::arg("x"), py::arg("tap"));
  m.def(
      "head_rms_norm",
      [](const Heads& x, Address weight, float eps) {
        head_rms_norm({static_cast<float*>(x.data), x.stride, pointer<float>(weight), x.num_tokens,
                       x.num_heads, x.head_dim, eps});
      },
      Unlocked(), py::arg("x"), py::arg("weight"), py::arg("eps"));
}

void bind_rows(py::module_& m) {
  m.def(
      "rotary",
      [](const Heads& q, const Heads& k, Address positions, const Rows& cos_sin) {
        rotary({.q = static_cast<float*>(q.data),
                .k = static_cast<float*>(k.data),
                .q_stride = q.stride,
                .k_stride = k.stride,
                .positions = pointer<int32_t>(positions),
                .cos_sin = cos_sin.data,
                .num_tokens = q.num_tokens,
                .num_positions = cos_sin.count,
                .q_heads = q.num_heads,
                .k_heads = k.num_heads,
                .head_dim = q.head_dim,
                .rotary_dim = cos_sin.stride});
      },
      Unlocked(), py::arg("q"), py::arg("k"), py::arg("positions"), py::arg("cos_sin"));
  m.def(
      "gated_activation",
      [](Address gate_up, Address out, int64_t num_tokens, int64_t intermediate, int activation) {
        gated_activation(
            {pointer<float>(gate_up), pointer<float>(out), num_tokens, intermediate, Activation(activation)});
      },
      Unlocked(), py::arg("gate_up"), py::arg("out"), py::arg("num_tokens"), py::arg("intermediate"),
      py::arg("activation"));
  m.def(
      "activate",
      [](Address x, int64_t count, int activation) {
        activate(pointer<float>(x), count, Activation(activation));
      },
      Unlocked(), py::arg("x"), py::arg("count"), py::arg("activation"));
}

// height, width
using Size = std::pair<int64_t, int64_t>;

void bind_pixels(py::module_& m) {
  m.def(
      "resize_pixels",
      [](Address in, Size in_size, Address out, Size out_size, int filter) {
        resize({pointer<const uint8_t>(in), pointer<uint8_t>(out), in_size.first, in_size.second,
                out_size.first, out_size.second, ResizeFilter(filter)});
      },
      Unlocked(), py::arg("in_"), py::arg("in_size"), py::arg("out"), py::arg("out_size"), py::arg("filter"));
}

}  // namespace

void bind_ops(py::module_& m) {
  bind_weights(m);
  bind_products(m);
  bind_norms(m);
  bind_rows(m);
  bind_pixels(m);
}

}  // namespace bequest
