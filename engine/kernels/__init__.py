"""Typed functions over the extension, one module per backend and subject: the only importers of its kernels.

`cpu` is everything a CPU runner needs, `cpu_weights` the matrices it stores; `cuda`, `cuda_attention` and
`cuda_sampler` are the same for a GPU.
"""
