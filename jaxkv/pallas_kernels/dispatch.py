"""Which implementation of an operation runs.

An operation has a plain JAX version, which is its definition and runs everywhere, and overrides for
a platform. An override is a module with two functions that take what the operation takes:

- `check(...)` raises `NotImplementedError` with the reason if it cannot serve these arguments, of
  which only shapes, dtypes and static options may count. Then the plain version runs.
- `run(...)` computes.

Modules of overrides are imported when a program for their platform is traced, never before: they
may need packages that are not installed.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.sharding import by_device, on_mesh

#: The platform that an override is for, as `jax.lax.platform_dependent` calls it; the extra that
#: installs what it needs has the same name.
PLATFORMS = {"mosaic": "tpu", "triton": "cuda", "native": "cpu"}
#: Platforms as devices name them.
_LOWERING = {"gpu": "cuda"}


class Forced(NamedTuple):
    """What `use_kernels` asks for."""

    name: str = "auto"
    interpret: bool = False


#: Part of the key of compiled programs, so that another choice compiles anew.
_forced = jax.make_user_context(Forced())


class Choice(NamedTuple):
    """Which implementation serves an operation on a platform, and why others do not."""

    name: str
    #: What each implementation that was asked first said.
    refused: dict[str, str]


#: What was chosen when programs were traced last: by operation, then by platform.
_chosen: dict[str, dict[str, Choice]] = {}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function with a plain version and overrides.

    Attributes:
      name: as users see it.
      plain: the definition.
      check: raises `NotImplementedError` for what not even the definition can serve.
      axes, out_axes: logical axes of the arrays, and of what is returned. On a mesh, overrides run
        on each device's part of a batch and of heads; where `axes` is None the plain version runs.
      overrides: module names by implementation.

    """

    name: str
    plain: Callable[..., Any]
    check: Callable[..., None]
    axes: tuple[tuple[str | None, ...], ...] | None
    out_axes: Any
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        """Runs the first implementation that serves the arguments.

        Args:
          arrays: what may be traced; pytrees.
          options: static.

        Raises:
          ValueError: no implementation serves them, or not the one that was asked for; the message
            says why.

        """
        if self.axes is None and on_mesh():
            return self.plain(*arrays, **options)
        forced = _forced.value
        if _is_forced():
            run, choice = self._forced_choice(forced.name, arrays, options)
            self._note("any", choice)
            if forced.interpret and run is not self.plain:
                options = {**options, "interpret": True}
            return self._by_device(run, arrays, options)
        branches = {}
        for platform in _platforms():
            run, choice = self._choose(platform, arrays, options)
            self._note(platform, choice)
            branches[platform] = run
        if len(set(branches.values())) == 1:
            (run, *_) = branches.values()
            return self._by_device(run, arrays, options)
        return lax.platform_dependent(
            *arrays,
            default=lambda *arrays: self.plain(*arrays, **options),
            **{
                _LOWERING.get(platform, platform): lambda *arrays, run=run: self._by_device(
                    run, arrays, options
                )
                for platform, run in branches.items()
                if run is not self.plain
            },
        )

    def _by_device(self, run: Callable[..., Any], arrays: Any, options: Any) -> Any:
        """Runs an override, which knows of one device, on all devices of a mesh."""
        function = functools.partial(run, **options)
        if run is self.plain or self.axes is None:
            return function(*arrays)
        return by_device(function, arrays, self.axes[: len(arrays)], self.out_axes)

    def _forced_choice(
        self, name: str, arrays: Any, options: Any
    ) -> tuple[Callable[..., Any], Choice]:
        if name not in self.overrides:
            return self.plain, Choice("plain", {name: f"there is none for {self.name}"})
        run, refusal = self._override(name, arrays, options)
        if run is None:
            raise ValueError(f"{self.name} cannot run as {name!r}, which was asked for: {refusal}")
        return run, Choice(name, {})

    def _choose(
        self, platform: str, arrays: Any, options: Any
    ) -> tuple[Callable[..., Any], Choice]:
        refused: dict[str, str] = {}
        if _forced.value.name == "auto":
            for name in self.overrides:
                if PLATFORMS[name] != _LOWERING.get(platform, platform):
                    continue
                run, refusal = self._override(name, arrays, options)
                if run is not None:
                    return run, Choice(name, refused)
                refused[name] = refusal
        try:
            self.check(*arrays, **options)
        except NotImplementedError as refusal:
            refused["plain"] = str(refusal)
            told = "; ".join(f"{name}: {why}" for name, why in refused.items())
            raise ValueError(f"no implementation of {self.name} serves this: {told}") from None
        return self.plain, Choice("plain", refused)

    def _override(
        self, name: str, arrays: Any, options: Any
    ) -> tuple[Callable[..., Any] | None, str]:
        """An override that serves the arguments, or None and the reason."""
        try:
            module = importlib.import_module(f"jaxkv.pallas_kernels.{self.overrides[name]}")
        except ImportError as error:
            return None, f"{error}; it comes with `pip install 'jaxkv[{PLATFORMS[name]}]'`"
        try:
            module.check(*arrays, **options)
        except NotImplementedError as refusal:
            return None, str(refusal)
        return module.run, ""

    def _note(self, platform: str, choice: Choice) -> None:
        _chosen.setdefault(self.name, {})[platform] = choice


def _platforms() -> tuple[str, ...]:
    """Platforms that the program being traced may be compiled for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform:
        return (device.platform,)
    default = jax.default_backend()
    return (default,) if default == "cpu" else (default, "cpu")


def check_dtypes(**arrays: Any) -> None:
    """Raises `NotImplementedError` unless all are of one floating dtype."""
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    if len(set(dtypes.values())) > 1 or not jnp.issubdtype(min(dtypes.values()), jnp.floating):
        told = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise NotImplementedError(f"arrays must be of one floating dtype, got {told}")


@contextlib.contextmanager
def use_kernels(name: str = "auto", *, interpret: bool = False) -> Iterator[None]:
    """Within this context, operations run as told.

    Args:
      name: "auto" (the best that serves), "plain" (as XLA compiles it), "mosaic" (TPU),
        "triton" (GPU) or "native" (CPU). Operations without an implementation of that name run
        as "plain".
      interpret: a "mosaic" kernel is run by Pallas' interpreter, on any platform: slow, and exact.

    Raises:
      ValueError: an unknown name.

    """
    if name not in ("auto", "plain", *PLATFORMS):
        known = ", ".join(["auto", "plain", *PLATFORMS])
        raise ValueError(f"kernels must be one of {known}, got {name!r}")
    if interpret and name != "mosaic":
        raise ValueError(f"interpret=True is for kernels 'mosaic', got {name!r}")
    with _forced(Forced(name, interpret)):
        yield


def kernels() -> dict[str, dict[str, Choice]]:
    """Which implementation serves each operation on each platform ("any" where one was asked for),
    as of the programs that were traced last; empty before the first.
    """
    return {name: dict(choices) for name, choices in sorted(_chosen.items())}


def chosen_on(platform: str) -> dict[str, str]:
    """The names of `kernels` for one platform, as devices name it."""
    found = {}
    for name, choices in kernels().items():
        choice = choices.get("any" if _is_forced() else platform)
        if choice is not None:
            found[name] = choice.name
    return found


def _is_forced() -> bool:
    return _forced.value.name not in ("auto", "plain")
