"""Kernels for CPU in C++ (`native_src`): compiled by the machine's own compiler when they are first
wanted, kept in jaxkv's cache folder, and called by XLA as foreign functions.

XLA reads a large matrix that meets few vectors, which is what a decode step does, at a fraction of
what memory gives; docs/performance.md has the numbers. Without a compiler the plain version runs.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxkv.errors import first_line
from jaxkv.hub import cache_folder
from jaxkv.statistics import GROUPS, ColumnSums

_FOLDER = Path(__file__).with_name("native_src")
#: Symbols of the library; targets of foreign calls have the same names.
_FUNCTIONS = tuple(
    f"jaxkv_{name}" for name in ("linear", "decode", "decode_shared", "prompt", "victim")
)
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120


def check() -> None:
    """Raises `NotImplementedError` with the reason if there are no native kernels here."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"programs here are for {jax.default_backend()}, not for CPU")
    reason = _load()
    if reason is not None:
        raise NotImplementedError(reason)


def call(function: str, out: Any, *arrays: Array, **options: Any) -> Any:
    """`jax.ffi.ffi_call` of a function of the library, which `check` has loaded."""
    aliases = options.pop("input_output_aliases", None)
    made = jax.ffi.ffi_call(function, out, input_output_aliases=aliases, vmap_method="sequential")
    return made(*arrays, **options)


def differentiable(run: Any, plain: Any, *arrays: Array) -> Any:
    """`run(*arrays)`; where derivatives are taken it is `plain`, which computes the same."""
    function = jax.custom_jvp(run)
    function.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return function(*arrays)


def check_sums(statistic: ColumnSums | None) -> None:
    """Raises `NotImplementedError` for sums of attention that no kernel here collects."""
    if statistic is not None and statistic.power <= 0:
        raise NotImplementedError(f"power must be positive, got {statistic.power}")


def sums(statistic: ColumnSums | None) -> dict[str, Any]:
    """How to collect, as attributes of a call."""
    wanted = statistic or ColumnSums()
    return {"reduction": np.int64(GROUPS.index(wanted.group)), "power": np.float32(wanted.power)}


@functools.cache
def _load() -> str | None:
    """Builds the library unless it is there, and makes it known to XLA; or says why not."""
    try:
        library = _opened()
        for name in _FUNCTIONS:
            target = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, target, platform="cpu")
    except (RuntimeError, OSError, AttributeError) as error:
        return f"native kernels cannot be had: {first_line(error)}"
    return None


def _opened() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.fspath(_built()))
    except OSError:
        # Damaged, by a full disk perhaps.
        _built().unlink()
        return ctypes.CDLL(os.fspath(_built()))


def _built() -> Path:
    """The library for this source, compiler and processor.

    Raises:
      RuntimeError: it cannot be compiled.

    """
    compiler = shlex.split(os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), ""))
    if not compiler:
        raise RuntimeError(
            f"there is no C++ compiler: install one of {', '.join(_COMPILERS)}, or name it in CXX"
        )
    arm = platform.machine().lower() in ("arm64", "aarch64")
    flags = ["-O3", "-mcpu=native" if arm else "-march=native", "-std=c++17"]
    # What the compiler defines tells its version, and what the processor can do.
    about = _output([*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    sources = sorted(_FOLDER.glob("*.cc"))
    texts = [file.read_bytes() for file in (*sources, *sorted(_FOLDER.glob("*.h")))]
    parts = (*texts, " ".join(flags).encode(), about, jax.__version__.encode())
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    library = cache_folder() / "native" / f"{name}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            link = ["-shared", "-fPIC", "-I", jax.ffi.include_dir(), "-I", os.fspath(_FOLDER)]
            # As one piece: most of the time goes into JAX's headers.
            whole = "".join(f'#include "{file.name}"\n' for file in sources)
            command = [*compiler, *flags, *link, "-x", "c++", "-", "-o", os.fspath(made)]
            _output(command, whole.encode())
            # Whole or not there, whoever else builds it now.
            os.replace(made, library)
    return library


def _output(command: list[str], given: bytes = b"") -> bytes:
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, timeout=_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        told = error.stderr.decode(errors="replace").splitlines()
        worst = next((line for line in told if "error" in line), "".join(told[:1]))
        raise RuntimeError(f"{command[0]} failed: {worst or error}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{command[0]} failed: {error}") from None
    return done.stdout
