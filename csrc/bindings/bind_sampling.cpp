#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/tensors.h"
#include "core/check.h"
#include "core/philox.h"
#include "ops/cpu/logprobs.h"
#include "ops/cpu/sampling.h"

namespace py = pybind11;

namespace bequest {
namespace {

using Ids = std::vector<int32_t>;

// SamplingRowParams in three parts, as engine/types/row.py has them.
struct Draw {
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
  uint64_t seed;
  uint32_t choice;
};

struct Penalties {
  float presence;
  float frequency;
  float repetition;
};

struct TokenBounds {
  int32_t min_tokens;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::optional<Ids> allowed;
  std::vector<Ids> bad_words;
  Ids held_back;
};

}  // namespace

template <>
inline constexpr auto fields_of<Draw> =
    std::tuple(&Draw::temperature, &Draw::top_k, &Draw::top_p, &Draw::min_p, &Draw::seed, &Draw::choice);
template <>
inline constexpr auto fields_of<Penalties> =
    std::tuple(&Penalties::presence, &Penalties::frequency, &Penalties::repetition);
template <>
inline constexpr auto fields_of<TokenBounds> =
    std::tuple(&TokenBounds::min_tokens, &TokenBounds::logit_bias, &TokenBounds::allowed,
               &TokenBounds::bad_words, &TokenBounds::held_back);

namespace {

void open_row(Sampler& self, int32_t row, const Draw& draw, const Penalties& penalties, TokenBounds bounds,
              const Ids& prompt, const Ids& outputs) {
  self.open_row(row,
                {.temperature = draw.temperature,
                 .top_k = draw.top_k,
                 .top_p = draw.top_p,
                 .min_p = draw.min_p,
                 .presence_penalty = penalties.presence,
                 .frequency_penalty = penalties.frequency,
                 .repetition_penalty = penalties.repetition,
                 .seed = draw.seed,
                 .choice = draw.choice,
                 .min_tokens = bounds.min_tokens,
                 .logit_bias = std::move(bounds.logit_bias),
                 .allowed = std::move(bounds.allowed),
                 .bad_words = std::move(bounds.bad_words),
                 .held_back = std::move(bounds.held_back)},
                prompt, outputs);
}

void bind_sampler(py::module_& m) {
  py::class_<Sampler>(m, "Sampler")
      .def(py::init<int32_t, int32_t>(), py::arg("num_rows"), py::arg("vocab_size"))
      .def("open_row", &open_row, py::arg("row"), py::arg("draw"), py::arg("penalties"), py::arg("bounds"),
           py::arg("prompt"), py::arg("outputs"))
      .def("close_row", &Sampler::close_row, py::arg("row"))
      .def(
          "constrain_row",
          [](Sampler& self, int32_t row, std::shared_ptr<Catalogue> catalogue, Ids end_tokens,
             const Ids& outputs) {
            self.constrain_row(row, std::move(catalogue), std::move(end_tokens), outputs);
          },
          py::arg("row"), py::arg("catalogue"), py::arg("end_tokens"), py::arg("outputs"))
      .def(
          "resolve",
          [](const Sampler& self, Address ids, Address rows, int64_t count) {
            self.resolve(pointer<int32_t>(ids), pointer<int32_t>(rows), count);
          },
          py::arg("ids"), py::arg("rows"), py::arg("count"))
      .def(
          "sample",
          [](Sampler& self, const Rows& logits, Address rows, Address positions, Address masks,
             Address tokens, Address bad) {
            self.sample({logits.data, logits.stride, pointer<int32_t>(rows), pointer<int32_t>(positions),
                         logits.count, pointer<int32_t>(masks), pointer<int32_t>(tokens),
                         pointer<bool>(bad)});
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("logits"), py::arg("rows"), py::arg("positions"),
          py::arg("masks"), py::arg("tokens"), py::arg("bad"))
      .def(
          "guess",
          [](Sampler& self, const Rows& logits, Address rows, Address positions, Address tokens,
             Address bad) {
            self.guess({logits.data, logits.stride, pointer<int32_t>(rows), pointer<int32_t>(positions),
                        logits.count, nullptr, pointer<int32_t>(tokens), pointer<bool>(bad)});
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("logits"), py::arg("rows"), py::arg("positions"),
          py::arg("tokens"), py::arg("bad"));
}

}  // namespace

void bind_sampling(py::module_& m) {
  bind_sampler(m);
  m.def(
      "logprobs",
      [](const Logits& logits, Address chosen, int64_t top, const LogprobOutput& out) {
        check(logits.dtype == DType::kF32, "logprobs: logits are float32");
        logprobs({static_cast<const float*>(logits.data), logits.stride, logits.num, logits.vocab_size,
                  pointer<int32_t>(chosen), top, out.chosen, out.rank, out.top_ids, out.top});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("logits"), py::arg("chosen"), py::arg("top"),
      py::arg("out"));
  m.def(
      "philox4x32",
      [](const std::array<uint32_t, 4>& counter, uint64_t key) {
        const PhiloxBlock block = philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key);
        return std::array<uint32_t, 4>{block.word[0], block.word[1], block.word[2], block.word[3]};
      },
      py::arg("counter"), py::arg("key"));
}

}  // namespace bequest
