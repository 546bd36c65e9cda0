"""The kernels for NVIDIA GPUs, as far as they can be checked without one.

Numbers: Triton's interpreter runs every kernel, called as on a GPU but for `triton_call`, against
the plain versions. Building: Triton compiles every kernel for several GPUs, and XLA compiles a
whole decode step. `scripts/gpu_check.py` does the rest where there is a GPU.

Needs `jax-triton` and `triton`; the last two tests `jax-cuda13-plugin` and `jax-cuda13-pjrt`.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

import jaxkv
from jaxkv import loops
from jaxkv.attention import attend_block
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.models.params import random_params
from jaxkv.pallas_kernels.decode import decode
from jaxkv.pallas_kernels.decode_shared import decode_shared
from jaxkv.pallas_kernels.dispatch import Choice, kernels
from jaxkv.policies import get
from jaxkv.sampling import sampling
from jaxkv.shared import Sharing
from jaxkv.statistics import ColumnMaxima, ColumnSums

decode_gpu = pytest.importorskip(
    "jaxkv.pallas_kernels.decode_gpu",
    reason="jax-triton 0.3 is not installed: `pip install 'jax-triton<0.4'`",
    exc_type=ImportError,
)
prompt_gpu = importlib.import_module("jaxkv.pallas_kernels.prompt_gpu")
decode_shared_gpu = importlib.import_module("jaxkv.pallas_kernels.decode_shared_gpu")

H100 = "NVIDIA H100 80GB HBM3"
TRITON_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32"}


@dataclasses.dataclass
class Memory:
    """A NumPy array as Triton's interpreter wants its arguments: like a tensor of PyTorch."""

    array: np.ndarray

    @property
    def dtype(self) -> str:
        return TRITON_TYPES[self.array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def new_empty(self, *_: Any, device: str) -> "Memory":
        return Memory(self.array)

    def untyped_storage(self) -> "Memory":
        return self

    def storage_offset(self) -> int:
        return 0

    def cpu(self) -> "Memory":
        return self

    def set_(self, storage: "Memory", *_: Any) -> None:
        self.array = storage.array

    size = stride = storage_offset

    def copy_(self, other: "Memory") -> None:
        assert other.array is self.array


def interpret(
    module: str,
    name: str,
    grid: tuple[int, ...],
    inputs: list,
    outputs: list,
    options: dict[str, Any],
) -> list[np.ndarray]:
    """Runs a kernel by the interpreter, which only a process that starts with it has."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    float32 = importlib.import_module("triton.language").float32

    class Builder(interpreter.InterpreterBuilder):
        def create_dot(self, a, b, *rest):
            """It holds bfloat16 as integers, and multiplies them as integers."""
            a, b = (self.create_fp_ext(x, float32) if x.dtype.is_bf16() else x for x in (a, b))
            return super().create_dot(a, b, *rest)

    interpreter.interpreter_builder.__class__ = Builder
    kernel = getattr(importlib.import_module(module), name)
    with np.errstate(all="ignore"):
        kernel[grid](*map(Memory, inputs), *map(Memory, outputs), **options)
    return outputs


@contextlib.contextmanager
def process(**environment: str):
    """A fresh process with these environment variables, to submit functions to."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()
    with pool:
        yield pool


@pytest.fixture(scope="module")
def interpreter():
    """A process that interprets kernels."""
    with process(TRITON_INTERPRET="1", JAX_PLATFORMS="cpu") as pool:
        yield pool


@pytest.fixture
def gpu(monkeypatch):
    """The overrides are as if traced for an H100."""
    monkeypatch.setattr(decode_gpu, "target", lambda: decode_gpu.Target(90, 132))


@pytest.fixture
def interpreted(gpu, interpreter, monkeypatch):
    """The overrides, with kernels that the interpreter runs."""

    def triton_call(*arrays, kernel, name, out_shape, grid, input_output_aliases=None, **options):
        for option in ("num_warps", "num_stages", "compute_capability"):
            del options[option]
        inputs = [np.array(array) for array in arrays]
        aliases = {o: i for i, o in (input_output_aliases or {}).items()}
        shapes, tree = jax.tree.flatten(out_shape)
        # What a kernel does not write, it must not have promised.
        outputs = [
            inputs[aliases[o]] if o in aliases else np.full(shape.shape, np.nan, shape.dtype)
            for o, shape in enumerate(shapes)
        ]
        run = (kernel.__module__, name, grid, inputs, outputs, options)
        job = interpreter.submit(interpret, *run)
        return jax.tree.unflatten(tree, job.result())

    monkeypatch.setattr(decode_gpu.jax_triton, "triton_call", triton_call)


def in_float32(arguments: tuple) -> list:
    """What plain versions are given."""
    floats = (x is not None and x.dtype != jnp.int32 for x in arguments)
    return [
        np.asarray(x, np.float32) if is_float else x
        for x, is_float in zip(kernel_cases.without_nan(arguments), floats, strict=True)
    ]


def close(found, wanted, tolerance: float) -> None:
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), tolerance, tolerance
    )


#: Of outputs; statistics are float32 in both.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}


@pytest.mark.parametrize(
    ("dtype", "dim", "group", "slots", "statistic", "window", "scores", "cores"),
    [
        ("float32", 64, 3, 150, ColumnSums(), None, True, 132),
        ("float32", 80, 1, 37, ColumnSums("mean", power=0.5), None, False, 132),
        ("float32", 8, 4, 64, None, 16, False, 132),
        ("float32", 128, 16, 70, ColumnSums("max"), None, True, 1),
        ("bfloat16", 64, 4, 301, ColumnSums(), 200, False, 132),
        ("bfloat16", 64, 4, 301, ColumnSums(), 200, True, 1),
        ("bfloat16", 96, 8, 100, ColumnSums("mean", power=2.0), None, True, 132),
        ("bfloat16", 256, 1, 61, ColumnSums("max", last=3), None, True, 132),
        ("float16", 128, 2, 130, ColumnSums(), None, True, 132),
    ],
)
def test_numbers_of_a_step(
    interpreted,
    compiled_quickly,
    monkeypatch,
    dtype,
    dim,
    group,
    slots,
    statistic,
    window,
    scores,
    cores,
):
    """`cores` of the GPU decide into how many parts the slots are cut."""
    monkeypatch.setattr(decode_gpu, "target", lambda: decode_gpu.Target(90, cores))
    arguments, there = kernel_cases.decode(0, 3, 2, group, dim, slots, dtype, onto=scores)
    options = {"statistics": () if statistic is None else (statistic,), "window": window}
    decode_gpu.check(*arguments, **options)
    out, keys, values, received, _ = decode_gpu.run(*arguments, **options)

    plain = jax.jit(functools.partial(decode.plain, **options))
    wanted, wanted_keys, wanted_values, wanted_received, _ = plain(*in_float32(arguments))
    assert (out.dtype, out.shape) == (arguments[0].dtype, arguments[0].shape)
    close(out, wanted, TOLERANCE[dtype])
    assert not np.any(out[2]), "a sequence that has ended gives nothing"
    assert (keys.dtype, values.dtype) == (out.dtype, out.dtype)
    there = there[..., None]
    for found, expected in ((keys, wanted_keys), (values, wanted_values)):
        found = np.asarray(found, np.float32)
        np.testing.assert_array_equal(np.where(there, found, 0), np.where(there, expected, 0))
        there = np.swapaxes(there, 2, 3)
    assert len(received) == len(wanted_received)
    for found, expected in zip(received, wanted_received, strict=True):
        assert found.dtype == jnp.float32
        close(found, expected, 2e-5)


@pytest.mark.parametrize(
    ("dtype", "dim", "group", "slots", "near", "skip", "window", "cores"),
    [
        ("float32", 64, 3, 150, (3, 40), None, None, 132),
        ("float32", 80, 1, 90, (0, 17), ("predicted", 0.4), None, 132),
        ("float32", 8, 4, 70, (2, 9), None, 40, 1),
        ("bfloat16", 64, 4, 301, (4, 60), ("predicted", 0.4), 200, 132),
        ("bfloat16", 128, 16, 130, (1, 30), None, None, 1),
    ],
)
def test_numbers_of_a_shared_step(
    interpreted, compiled_quickly, monkeypatch, dtype, dim, group, slots, near, skip, window, cores
):
    """Seen to fail when a part meets the other's tokens, far queries are the near ones, a head that
    is skipped reads, or a sequence that has ended writes into its ring.
    """
    monkeypatch.setattr(decode_gpu, "target", lambda: decode_gpu.Target(90, cores))
    sharing = Sharing(((0,), (0,)), *near, skip=skip)
    arguments, there = kernel_cases.decode_shared(0, 3, 2, group, dim, slots, sharing, dtype)
    options = {"sharing": sharing, "window": window}
    plain = jax.jit(functools.partial(decode_shared.plain, **options))
    if skip is not None:
        # The gate is a little below tau in the first KV head, and a little above it in the second,
        # but for one of several query heads of the first sequence.
        ring = plain(*in_float32(arguments))[1]
        queries = np.asarray(arguments[0], np.float32).reshape(3, 2, group, dim)
        logits = np.einsum("bkgd,bksd->bkgs", queries, ring) * dim**-0.5
        held = (np.asarray(arguments[8]) < slots)[:, :, None]
        near_lse = jax.nn.logsumexp(np.where(held, logits, -np.inf), -1)
        apart = np.log(skip[1] / (1 - skip[1])) + np.full((3, 2, group), 0.1)
        apart[:, 0] -= 0.2
        apart[0, 1, 1:] -= 0.2
        arguments = (*arguments[:11], jnp.array(near_lse - apart, jnp.float32))
    decode_shared_gpu.check(*arguments, **options)
    out, ring, values, counts = decode_shared_gpu.run(*arguments, **options)

    wanted, wanted_ring, wanted_values, wanted_counts = plain(*in_float32(arguments))
    assert (out.dtype, out.shape) == (arguments[0].dtype, arguments[0].shape)
    close(out, wanted, TOLERANCE[dtype])
    assert not np.any(out[2]), "a sequence that has ended gives nothing"
    assert (ring.dtype, values.dtype) == (out.dtype, out.dtype)
    np.testing.assert_array_equal(np.asarray(ring, np.float32), wanted_ring)
    found = np.asarray(values, np.float32)
    there = there[:, :, None]
    np.testing.assert_array_equal(np.where(there, found, 0), np.where(there, wanted_values, 0))
    if skip is not None:
        np.testing.assert_array_equal(counts, wanted_counts)
        assert 0 < counts[..., 0].sum() < counts[..., 1].sum()


@pytest.mark.parametrize(
    ("dtype", "dim", "group", "t", "before", "statistic", "window"),
    [
        ("float32", 64, 3, 75, 0, ColumnSums(), None),
        ("float32", 80, 1, 40, 50, ColumnSums("mean", power=0.5), None),
        ("float32", 8, 2, 70, 20, ColumnSums("max", last=9), 33),
        ("float32", 128, 2, 1, 0, ColumnSums(), None),
        ("bfloat16", 64, 2, 200, 0, ColumnSums("mean"), 70),
        ("bfloat16", 64, 3, 140, 70, ColumnSums("max", power=2.0), None),
        ("bfloat16", 128, 1, 260, 0, ColumnSums(last=40), None),
        ("bfloat16", 256, 2, 70, 33, None, 50),
    ],
)
def test_numbers_of_a_prompt(
    interpreted, compiled_quickly, dtype, dim, group, t, before, statistic, window
):
    arguments = kernel_cases.prompt(0, 3, 2, group, dim, t, before, dtype)
    options = {"statistics": () if statistic is None else (statistic,), "window": window}
    layer = jnp.int32(0)
    prompt_gpu.check(*arguments, **options, layer=layer)
    out, received = prompt_gpu.run(*arguments, **options, layer=layer)

    plain = jax.jit(functools.partial(attend_block, **options, layer=layer))
    wanted, wanted_received = plain(*in_float32(arguments))
    assert (out.dtype, out.shape) == (arguments[0].dtype, arguments[0].shape)
    out, wanted = np.asarray(out, np.float32), np.asarray(wanted)
    assert np.all(np.isfinite(out)), "also padding, which goes on through the model"
    real = (np.asarray(arguments[1]) >= 0)[:, None, None, :, None]
    close(out * real, wanted * real, TOLERANCE[dtype])
    assert len(received) == len(wanted_received)
    for found, expected in zip(received, wanted_received, strict=True):
        assert found.dtype == jnp.float32
        close(found, expected, 1e-4)


def test_what_is_refused(gpu):
    step, _ = kernel_cases.decode(0, 3, 2, 1, 16, 32)

    def with_dtype(dtype):
        return [a.astype(jnp.dtype(dtype)) if i < 5 else a for i, a in enumerate(step)]

    wide = [np.concatenate([a] * 17, -1) if i < 4 else a for i, a in enumerate(step)]
    wide[4] = np.concatenate([step[4]] * 17, 2)
    many = [np.concatenate([step[0]] * 17, 1), *step[1:]]
    pool = [*step[:3], step[3][:, :1], step[4][:, :1], *step[5:]]
    for arguments, statistics, told in [
        (step, (ColumnMaxima(),), "only ColumnSums"),
        (step, (ColumnSums(), ColumnSums()), "only ColumnSums"),
        (step, (ColumnSums(power=-1.0),), "power must be positive"),
        (with_dtype("float8_e4m3fn"), (), "float8_e4m3fn"),
        ([*step[:3], step[3].astype(jnp.bfloat16), *step[4:]], (), "one floating dtype"),
        (wide, (), "at most 256, got 272"),
        (many, (), "at most 16 query heads, got 17"),
        (pool, (), "its own slots, got 1"),
    ]:
        with pytest.raises(NotImplementedError, match=told):
            decode_gpu.check(*arguments, statistics=statistics)
    exact = Sharing(((0,), (0,)), 2, 6, skip=("exact", 0.7))
    shared, _ = kernel_cases.decode_shared(0, 3, 2, 1, 16, 40, exact)
    with pytest.raises(NotImplementedError, match="'predicted', got 'exact'"):
        decode_shared_gpu.check(*shared, sharing=exact)
    block = kernel_cases.prompt(0, 3, 2, 1, 16, 8, 0)
    with pytest.raises(NotImplementedError, match="distances must be exact"):
        prompt_gpu.check(*block, window=None, layer=jnp.int32(0), far=object())
    heads = [jnp.zeros((2**16, 1, 1, 1, 16), jnp.float32), *block[1:]]
    with pytest.raises(NotImplementedError, match="at most 65535 together, got 65536"):
        prompt_gpu.check(*heads, window=None, layer=jnp.int32(0))
    with pytest.raises(ValueError, match="interpret must be False"):
        decode_gpu.run(*step, interpret=True)


def test_the_target_is_the_gpu_traced_for():
    def traced_for(kind: str):
        device = jax.sharding.AbstractDevice(kind, 7, "gpu")
        with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            return decode_gpu.target()

    assert traced_for(H100) == (90, 7)
    assert traced_for("NVIDIA A100-SXM4-80GB") == (80, 7)
    with pytest.raises(NotImplementedError, match="'Wonder 1' is not on this machine"):
        traced_for("Wonder 1")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="no NVIDIA GPU"):
            decode_gpu.target()


def test_splits_fill_the_gpu():
    for rows, slots, block in [(8, 1024, 64), (8, 32768, 64), (300, 8192, 64), (1, 5, 16)]:
        splits, split = decode_gpu._split(rows, slots, block, 132)
        assert split % block == 0
        assert (splits - 1) * split < slots <= splits * split
    # One wave of few heads; an almost empty second wave is avoided.
    assert 8 * decode_gpu._split(8, 32768, 64, 132)[0] in range(200, 265)
    assert decode_gpu._split(300, 8192, 64, 132)[0] > 1
    assert decode_gpu._split(2640, 8192, 64, 132)[0] == 1


def calls(monkeypatch, dtype: str, dim: int, capability: int) -> list[tuple]:
    """Every kernel as it would be called for a usual shape, with its arrays and options."""
    found = []

    def triton_call(*arrays, kernel, out_shape, **options):
        found.append((kernel, [*arrays, *jax.tree.leaves(out_shape)], options))
        return out_shape

    monkeypatch.setattr(decode_gpu, "target", lambda: decode_gpu.Target(capability, 132))
    monkeypatch.setattr(decode_gpu.jax_triton, "triton_call", triton_call)

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    batch, kv_heads, group, slots, t = 2, 2, 4, 1024, 256
    sums = (ColumnSums(),)
    decode_gpu.run(
        array(batch, kv_heads * group, dim),
        array(batch, kv_heads, dim),
        array(batch, kv_heads, dim),
        array(batch, kv_heads, slots, dim),
        array(batch, kv_heads, dim, slots),
        array(batch, kv_heads, slots, dtype="int32"),
        array(batch, kv_heads, dtype="int32"),
        array(batch, dtype="int32"),
        array(batch, kv_heads, slots, dtype="float32"),
        None,
        statistics=sums,
    )
    near = 256
    with monkeypatch.context() as patch:
        # Only shapes go around.
        patch.setattr(decode_shared_gpu.lax, "optimization_barrier", lambda arrays: arrays)
        patch.setattr(decode_shared_gpu.jnp, "concatenate", lambda both, axis: both[0])
        decode_shared_gpu.run(
            array(batch, kv_heads * group, dim),
            array(batch, kv_heads * group, dim),
            array(batch, kv_heads, dim),
            array(batch, kv_heads, dim),
            array(batch, kv_heads, near, dim),
            array(batch, kv_heads, dim, slots),
            array(batch, kv_heads, slots, dim),
            array(batch, kv_heads, slots, dtype="int32"),
            array(batch, kv_heads, near, dtype="int32"),
            array(batch, kv_heads, dtype="int32"),
            jnp.zeros((batch,), jnp.int32),
            None,
            sharing=Sharing(((0,), (0,)), 16, near - 16),
        )
    with monkeypatch.context() as patch:
        patch.setattr(prompt_gpu.jnp, "max", lambda array, axis: array)
        prompt_gpu.run(
            array(batch, kv_heads, group, t, dim),
            array(batch, t, dtype="int32"),
            array(batch, kv_heads, slots + t, dim),
            array(batch, kv_heads, dim, slots + t),
            array(batch, kv_heads, slots + t, dtype="int32"),
            window=None,
            statistics=sums,
            layer=None,
        )
    return found


def build(kernel: Any, arrays: list, options: dict[str, Any], capability: int) -> Any:
    """Compiles a kernel as jax-triton would."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names[: len(arrays)]
    types_of = {n: f"*{TRITON_TYPES[a.dtype.name]}" for n, a in zip(names, arrays, strict=True)}
    constants = {n: options[n] for n in kernel.arg_names[len(arrays) :]}
    source = triton.compiler.ASTSource(
        kernel,
        types_of | dict.fromkeys(constants, "constexpr"),
        constants,
        {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))},
    )
    flags = {key: options[key] for key in ("num_warps", "num_stages")}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target, {**flags, "enable_fp_fusion": True})


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: what did not fit into registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return {"registers": int(found[1]), "stack": int(found[2])}


#: Bytes of shared memory that a program may have; of 8.x, the GPUs with the least.
SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.parametrize(
    ("capability", "dtype", "dim"),
    [
        (80, "bfloat16", 128),
        (90, "float32", 64),
        (90, "float32", 128),
        (90, "bfloat16", 64),
        (90, "bfloat16", 128),
        (100, "bfloat16", 128),
    ],
)
def test_kernels_build(monkeypatch, tmp_path, capability, dtype, dim):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = calls(monkeypatch, dtype, dim, capability)
    assert [kernel.__name__ for kernel, *_ in found] == [
        "decode_split",
        "decode_join",
        "shared_near",
        "shared_far",
        "decode_join",
        "prompt_attend",
        "prompt_collect",
    ]
    # The same again, for no statistic.
    del found[4]
    # Time is short: elsewhere those that read values.
    if capability != 90:
        found = [
            call for call in found if call[0].__name__ not in ("decode_join", "prompt_collect")
        ]
    for kernel, arrays, options in found:
        built = build(kernel, arrays, options, capability)
        used = {"shared": built.metadata.shared, **resources(built.asm["cubin"])}
        print(f"{kernel.__name__} {dtype} {dim} for {capability}: {used}")
        assert used["shared"] <= SHARED[capability], kernel
        assert used["stack"] == 0, kernel


#: An H100 as XLA wants to know it (`GpuTargetConfigProto`).
TARGET_CONFIG = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  clock_rate_ghz: 1.98
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "%s"
"""


def compile_for_gpu(prompt: bool, shared: bool = False) -> dict[str, Any]:
    """Compiles the loop of decoding, or the reading of a prompt after another, for an H100 that is
    not there, and looks at the program. `shared`: of two layers, the second reads the first one's
    distant keys.
    """
    described = topologies.get_topology_desc(
        "h100", "cuda", target_config=TARGET_CONFIG % H100, topology="1x1x1"
    )
    mesh = Mesh(np.array(described.devices), ("x",))
    config = LlamaConfig.from_hf(
        {
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 384,
            "num_hidden_layers": 1 + shared,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
        }
    )
    batch, slots, t, policy = 2, 1024, 256, get("h2o", 1023)
    if shared:
        policy = jaxkv.PoD(jaxkv.PodPlan.every(2, config), sinks=16, recent=240)
    sharding = NamedSharding(mesh, PartitionSpec())

    def shapes(make: Callable[[], Any]) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(make),
        )

    def empty_cache() -> jaxkv.Cache:
        budgets = jnp.full((config.num_layers, batch), slots - 1, jnp.int32)
        return loops.empty_cache(params, policy, budgets, [slots] * config.num_layers)

    def start() -> loops.Loop:
        keys = jax.random.split(jax.random.key(0), batch)
        token = jnp.zeros((batch,), jnp.int32)
        return loops.Loop(empty_cache(), token, jnp.zeros((batch,), bool), keys, None)

    params = shapes(lambda: random_params(Llama, config, dtype=jnp.bfloat16))
    cache = shapes(empty_cache)
    with use_abstract_mesh(mesh.abstract_mesh):
        if prompt:
            logits = shapes(lambda: jnp.zeros((batch, config.vocab_size), jnp.float32))
            tokens = shapes(lambda: jnp.zeros((batch, t), jnp.int32))
            added = shapes(lambda: jnp.zeros((batch,), jnp.int32))
            lowered = loops.read_more.program.lower(params, logits, cache, tokens, added, policy)
        else:
            eos, steps = shapes(lambda: jnp.zeros((1,), jnp.int32)), shapes(lambda: jnp.int32(0))
            loop, options = shapes(start), shapes(sampling)
            lowered = loops.decode.program.lower(params, loop, options, eos, steps, policy)
    compiled = lowered.compile()
    hlo = compiled.as_text()
    of_cache = {
        f"bf16[{','.join(map(str, array.shape))}]"
        for array in jax.tree.leaves(cache)
        if array.ndim == 4
    }
    return {
        "chosen": {name: choices["gpu"] for name, choices in kernels().items()},
        "calls per layer": hlo.count('custom_call_target="triton_kernel_call"') / config.num_layers,
        "cache": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
        "aliased": compiled.memory_analysis().alias_size_in_bytes,
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "mentions of keys and values": [hlo.count(shape) for shape in of_cache],
        "copies of them": [
            line
            for line in hlo.splitlines()
            if " copy(" in line and any(f"= {shape}" in line for shape in of_cache)
        ],
    }


@pytest.fixture(scope="module")
def compiler():
    """A process whose XLA knows CUDA and does not look for a GPU."""
    pytest.importorskip(
        "jax_plugins.xla_cuda13",
        reason="XLA for CUDA is not installed (`pip install jax-cuda13-plugin jax-cuda13-pjrt`)",
    )
    with process(JAX_PLATFORMS="cpu") as pool:
        yield pool


def test_a_step_compiles_for_a_gpu_and_changes_the_cache_in_place(compiler):
    found = compiler.submit(compile_for_gpu, False).result()
    print(found)
    assert found["chosen"]["decode"] == Choice("triton", {})
    assert found["calls per layer"] == 2
    assert found["aliased"] >= found["cache"]
    assert found["temporary"] < found["cache"] / 2
    assert all(found["mentions of keys and values"])
    assert not found["copies of them"]


def test_a_shared_step_compiles_for_a_gpu_and_changes_the_cache_in_place(compiler):
    found = compiler.submit(compile_for_gpu, False, True).result()
    print(found)
    assert found["chosen"]["decode_shared"] == Choice("triton", {})
    # Two in the root, three in the layer that follows.
    assert found["calls per layer"] == 5 / 2
    assert found["aliased"] >= found["cache"]
    assert found["temporary"] < found["cache"] / 2
    assert all(found["mentions of keys and values"])
    assert not found["copies of them"]


def test_a_prompt_compiles_for_a_gpu(compiler):
    found = compiler.submit(compile_for_gpu, True).result()
    print(found)
    assert found["chosen"]["prompt"] == Choice("triton", {})
    assert found["calls per layer"] == 2
    assert found["aliased"] >= found["cache"]
