"""Kernels: for each operation the plain definition, and what overrides it on TPU, GPU and CPU.

`dispatch` chooses. `decode`, `decode_shared`, `prompt`, `gather`, `linear` and `victim` are the
operations, each in a file of its own beside its overrides: `decode_tpu` (Pallas, Mosaic),
`decode_gpu` (Triton), `decode_cpu` (C++, in `native_src`, built by `native`), and so on.
"""
