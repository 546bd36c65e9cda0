"""Kernels: for each operation the plain definition, and what overrides it on TPU and GPU.

`dispatch` chooses. `decode`, `prompt` and `gather` are the operations, each in a file of its own
beside its overrides: `decode_tpu` (Pallas, Mosaic), `decode_gpu` (Triton), and so on.
"""
