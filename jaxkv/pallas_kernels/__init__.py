"""Kernels, one file each: the plain definition, and what overrides it on TPU and GPU.

None yet: attention runs as XLA compiles it, see `jaxkv.attention`.
"""
