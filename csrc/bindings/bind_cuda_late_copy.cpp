// Copies that are queued before their content is there: ops/cuda/late_copy.h.
#include "bindings/cuda_tensors.h"
#include "ops/cuda/late_copy.h"

namespace py = pybind11;

// Launches are too short to be worth releasing the GIL.

namespace bequest {
namespace {

// The host waits here, if it has to: mostly the copy is long done.
void await_source(cuda::LateCopy& copy) {
  if (copy.done()) return;
  const py::gil_scoped_release others_run;
  copy.settle();
}

}  // namespace

void bind_cuda_late_copy(py::module_& m) {
  using Copy = cuda::LateCopy;
  py::class_<Copy>(m, "CudaLateCopy")
      .def(py::init([](Address flag, Address source, Address destination, Address arrived) {
             return std::make_unique<Copy>(cuda::LateCopyPlaces{.flag = pointer<uint32_t>(flag),
                                                                .source = pointer<void>(source),
                                                                .destination = pointer<void>(destination),
                                                                .arrived = pointer<uint32_t>(arrived)});
           }),
           py::arg("flag"), py::arg("source"), py::arg("destination"), py::arg("arrived"))
      .def(
          "pass_by", [](Copy& copy, Address stream) { copy.pass(stream_of(stream)); }, py::arg("stream"))
      .def(
          "queue",
          [](Copy& copy, int64_t num_bytes, uint32_t value, Address stream) {
            await_source(copy);
            copy.queue(num_bytes, value, stream_of(stream));
          },
          py::arg("num_bytes"), py::arg("value"), py::arg("stream"))
      .def(
          "queue_beside",
          [](Copy& copy, const Copy& before, int64_t num_bytes, uint32_t value, Address beside,
             Address stream) {
            await_source(copy);
            copy.queue_beside(before, num_bytes, value, stream_of(beside), stream_of(stream));
          },
          py::arg("before"), py::arg("num_bytes"), py::arg("value"), py::arg("beside"), py::arg("stream"));
}

}  // namespace bequest
