#include <optional>
#include <utility>

#include "bindings/tensors.h"
#include "core/helpers.h"
#include "ops/cpu/activation.h"
#include "ops/cpu/base64.h"
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
      [](const Heads& q, const Heads& k, Address positions, const Rows& cos_sin, Address query_scales) {
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
                .rotary_dim = cos_sin.stride,
                .query_scales = pointer<float>(query_scales)});
      },
      Unlocked(), py::arg("q"), py::arg("k"), py::arg("positions"), py::arg("cos_sin"),
      py::arg("query_scales"));
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
      [](Address in, Size in_size, int in_pixel, Address out, Size out_size, int filter) {
        resize({pointer<const uint8_t>(in), pointer<uint8_t>(out), in_size.first, in_size.second, in_pixel,
                out_size.first, out_size.second, ResizeFilter(filter)});
      },
      Unlocked(), py::arg("in_"), py::arg("in_size"), py::arg("in_pixel"), py::arg("out"),
      py::arg("out_size"), py::arg("filter"));
  m.def(
      "copy_in_parts",
      [](Address to, Address from, size_t bytes) {
        copy_in_parts(pointer<void>(to), pointer<const void>(from), bytes);
      },
      Unlocked(), py::arg("to"), py::arg("from_"), py::arg("bytes"));
}

// Bytes, or None for text that decode_base64 does not take.
py::object from_base64(const py::str& text, py::ssize_t begin) {
  if (!PyUnicode_IS_ASCII(text.ptr())) return py::none();
  const auto* const chars = reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(text.ptr()));
  const py::ssize_t size = PyUnicode_GET_LENGTH(text.ptr());
  check(0 <= begin && begin <= size, "the text begins within itself");
  const int64_t num_bytes = base64_size(chars + begin, size - begin);
  if (num_bytes < 0) return py::none();
  auto bytes = py::reinterpret_steal<py::object>(PyBytes_FromStringAndSize(nullptr, num_bytes));
  if (!bytes) throw py::error_already_set();
  auto* const out = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes.ptr()));
  bool fits = false;
  {
    const py::gil_scoped_release unlocked;
    fits = decode_base64(chars + begin, size - begin, out);
  }
  return fits ? bytes : py::none();
}

}  // namespace

void bind_ops(py::module_& m) {
  bind_weights(m);
  bind_products(m);
  bind_norms(m);
  bind_rows(m);
  bind_pixels(m);
  m.def("decode_base64", &from_base64, py::arg("text"), py::arg("begin"));
}

}  // namespace bequest
