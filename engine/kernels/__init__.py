"""Typed functions over the extension, one module per backend and subject: the only importers of its kernels.

`cpu`, `cpu_weights` (the matrices it stores) and `cpu_beams` are what a CPU runner needs; `cuda`, `cuda_attention`,
`cuda_sampler` and `cuda_beams` are the same for a GPU; `catalogue` and `beams` are what both say to their kernels.
Nothing here chooses between kernels: shapes are checked, and tensors become the structs of csrc/bindings/tensors.h.
"""
