#include <pybind11/numpy.h>

#include "bindings/bindings.h"
#include "core/check.h"
#include "core/dot.h"
#include "core/flag.h"
#include "core/host_memory.h"
#include "core/isa.h"
#include "core/threads.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  using namespace bequest;
  m.doc() = "The C++ core of Bequest. Use engine.kernels, which checks shapes and documents them.";
  py::register_exception<Error>(m, "Error", PyExc_RuntimeError);
  // Of a NumPy array, in a tenth of the time that its own attributes take: a step asks a dozen times.
  m.def("address", [](const py::array& array) { return reinterpret_cast<Address>(array.data()); });
  m.def("set_num_threads", &set_num_threads);
  m.def("num_threads", &num_threads);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("advise_large_pages",
        [](Address address, size_t bytes) { advise_large_pages(pointer<void>(address), bytes); });
  m.def(
      "populate_pages",
      [](Address address, size_t bytes) { return populate_pages(pointer<void>(address), bytes); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "publish", [](Address flag, uint32_t value) { publish(pointer<uint32_t>(flag), value); },
      py::arg("flag"), py::arg("value"));
  m.def("isa", [] { return isa_name(current_isa()); });
  m.def("dot", [] { return dot_name(current_dot()); });
  m.def("dot_is_fused", [] { return is_fused(current_dot()); });
#ifdef BEQUEST_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
  bind_cache(m);
  bind_ops(m);
  bind_delta_net(m);
  bind_experts(m);
  bind_attention(m);
  bind_attention_work(m);
  bind_beams(m);
  bind_sampling(m);
  bind_stack(m);
  bind_outlets(m);
  bind_constraints(m);
  bind_answers(m);
#ifdef BEQUEST_WITH_CUDA
  bind_cuda_attention(m);
  bind_cuda_ops(m);
  bind_cuda_experts(m);
  bind_cuda_late_copy(m);
  bind_cuda_lora(m);
  bind_cuda_stack(m);
#endif
}
