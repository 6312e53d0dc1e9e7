#include <pybind11/stl.h>

#include <array>

#include "bindings/bindings.h"
#include "core/philox.h"
#include "ops/cpu/logprobs.h"
#include "ops/cpu/sampling.h"

namespace py = pybind11;

namespace bequest {
namespace {

using Ids = std::vector<int32_t>;

void bind_sampler(py::module_& m) {
  py::class_<Sampler>(m, "Sampler")
      .def(py::init<int32_t, int32_t>())
      .def("open_row",
           [](Sampler& self, int32_t row, float temperature, int32_t top_k, float top_p, float min_p,
              float presence_penalty, float frequency_penalty, float repetition_penalty, uint64_t seed,
              uint32_t choice, int32_t min_tokens, std::vector<std::pair<int32_t, float>> logit_bias,
              std::optional<Ids> allowed, std::vector<Ids> bad_words, Ids held_back, const Ids& prompt,
              const Ids& outputs) {
             self.open_row(row,
                           {temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty,
                            repetition_penalty, seed, choice, min_tokens, std::move(logit_bias),
                            std::move(allowed), std::move(bad_words), std::move(held_back)},
                           prompt, outputs);
           })
      .def("close_row", &Sampler::close_row)
      .def("constrain_row",
           [](Sampler& self, int32_t row, std::shared_ptr<Catalogue> catalogue, Ids end_tokens,
              const Ids& outputs) {
             self.constrain_row(row, std::move(catalogue), std::move(end_tokens), outputs);
           })
      .def("resolve",
           [](const Sampler& self, Address ids, Address rows, int64_t count) {
             self.resolve(pointer<int32_t>(ids), pointer<int32_t>(rows), count);
           })
      .def(
          "sample",
          [](Sampler& self, Address logits, int64_t stride, Address rows, Address positions, int64_t num,
             Address masks, Address tokens, Address bad) {
            self.sample({pointer<float>(logits), stride, pointer<int32_t>(rows), pointer<int32_t>(positions),
                         num, pointer<int32_t>(masks), pointer<int32_t>(tokens), pointer<bool>(bad)});
          },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_sampling(py::module_& m) {
  bind_sampler(m);
  m.def(
      "logprobs",
      [](Address logits, int64_t stride, int64_t num, int64_t vocab_size, Address chosen, int64_t top,
         Address chosen_logprob, Address rank, Address top_ids, Address top_logprob) {
        logprobs({pointer<float>(logits), stride, num, vocab_size, pointer<int32_t>(chosen), top,
                  pointer<float>(chosen_logprob), pointer<int32_t>(rank), pointer<int32_t>(top_ids),
                  pointer<float>(top_logprob)});
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("philox4x32", [](const std::array<uint32_t, 4>& counter, uint64_t key) {
    const PhiloxBlock block = philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key);
    return std::array<uint32_t, 4>{block.word[0], block.word[1], block.word[2], block.word[3]};
  });
}

}  // namespace bequest
