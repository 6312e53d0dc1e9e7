"""Typed functions over the extension, one module per backend and subject: the only importers of its kernels.

`cpu` and `cpu_beams` are everything a CPU runner needs; `cuda`, `cuda_attention`, `cuda_sampler` and `cuda_beams` are
the same for a GPU; `catalogue` and `beams` are what both say to their kernels.
"""
