// The only folder of csrc that knows Python. Each subject binds itself; tensors arrive as structs of data
// pointers and sizes (tensors.h) that engine/kernels has checked.
#pragma once

#include <pybind11/pybind11.h>

namespace bequest {

// A tensor's data pointer as Python passes it.
using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_cache(pybind11::module_& m);
void bind_ops(pybind11::module_& m);
void bind_delta_net(pybind11::module_& m);
void bind_experts(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_attention_work(pybind11::module_& m);
void bind_sampling(pybind11::module_& m);
void bind_stack(pybind11::module_& m);
void bind_beams(pybind11::module_& m);
void bind_outlets(pybind11::module_& m);
void bind_constraints(pybind11::module_& m);
void bind_answers(pybind11::module_& m);
// Only with BEQUEST_WITH_CUDA: files whose names begin so are left out of other builds.
void bind_cuda_attention(pybind11::module_& m);
void bind_cuda_ops(pybind11::module_& m);
void bind_cuda_experts(pybind11::module_& m);
void bind_cuda_late_copy(pybind11::module_& m);
void bind_cuda_lora(pybind11::module_& m);
void bind_cuda_stack(pybind11::module_& m);

}  // namespace bequest
