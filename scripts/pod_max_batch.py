"""The largest batch that one chip holds while decoding: the whole cache against PoD's.

    JAXKV_VENV=.venv-aot scripts/test_aot --version      # an environment with the TPU's compiler
    .venv-aot/bin/python scripts/pod_max_batch.py        # half an hour on two cores
    .venv-aot/bin/python scripts/pod_max_batch.py --quick --snapkv 0.125

The PoD paper (arXiv 2412.02252) reports more than 30% larger batches on one device. Shown here for
the shapes of Llama-3-8B (32 layers, 32 heads, 8 KV heads of 128 dims, bfloat16), by the real
compiler for TPU, without one: the program that decodes, with all 32 layers, is compiled for larger
and larger batches until the compiler says that it does not fit the chip's memory: weights, cache,
and all that is in memory for a while. No number is extrapolated. (On a v5e, `--chips v5e`, weights
leave 0.8 of 15.75 GiB: not one sequence of 8192 tokens fits.)

A sequence has a cache for `--lengths` tokens, of which PoD counts 16 + 4080 as near, as published.
The plan is made up: `--share` of the heads follow (70%, which is 35% of keys and values), as many
in every KV head, in blocks of like sizes. With `--snapkv SHARE` also for SnapKV, which keeps that
share of the tokens, and for PoD with SnapKV in it (16 + 240 near tokens, since near keys are kept
whether their tokens are or not).
"""

import argparse
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pod_common import Option, Records, add_options, parse, parser, run, table

from jaxkv import PoD, PodPlan, SnapKV, loops
from jaxkv.models.base import structure
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.models.params import Params
from jaxkv.policies import Full, Policy
from jaxkv.positions import rotary_frequencies
from jaxkv.room import plan
from jaxkv.sampling import row_keys, sampling
from jaxkv.sharding import format_of, spec_of

OPTIONS = [
    Option("lengths", int, [8192, 16_384, 32_768], [8192], "tokens of a sequence"),
    Option("share", float, 0.7, 0.7, "of the heads, those that follow another layer"),
]


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the compiler knows a chip by, and the memory it is said to have, to begin with."""

    topology: str
    gigabytes: int


CHIPS = {
    "v5e": Chip("v5e:2x2", 16),
    "v6e": Chip("v6e:2x2", 32),
    "v5p": Chip("v5p:2x2x1", 95),
}
_LAYERS, _THETA = 32, 500_000.0
LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=_LAYERS,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131_072,
    tie_embeddings=False,
    rotary_embedding=rotary_frequencies(128, _THETA, None),
    norm_eps=1e-5,
    windows=(None,) * _LAYERS,
)
#: Tokens that steps may add to what SnapKV kept.
_GROW = 64
_GIB = 2**30


def made_up_plan(config: Any, share: float) -> PodPlan:
    """A plan under which so many of all heads follow: evenly over KV heads, in blocks of like
    sizes.
    """
    layers, heads = config.num_layers, config.num_kv_heads
    if not 0 < share <= 1 - 1 / layers:
        raise ValueError(f"--share must be above 0 and at most {1 - 1 / layers:g}, got {share}")
    roots = round((1 - share) * layers * heads)
    ends = np.linspace(0, roots, heads + 1).round().astype(int)
    columns = []
    for count in np.diff(ends):
        starts = np.linspace(0, layers, count, endpoint=False).round().astype(int)
        columns.append(starts[np.searchsorted(starts, np.arange(layers), "right") - 1])
    return PodPlan.for_config(np.transpose(columns).tolist(), config)


def methods(shared: PodPlan, length: int, snapkv: float | None) -> dict[str, Policy]:
    """Who is compared."""
    found: dict[str, Policy] = {"full": Full(), "PoD": PoD(shared)}
    if snapkv is not None:
        # What steps add, and the newcomer, are counted.
        some = SnapKV(budget=round(snapkv * length) - _GROW - 1)
        found["SnapKV"] = some
        found["PoD + SnapKV"] = PoD(shared, sinks=16, recent=240, of=some)
    return found


def decode_step(mesh: Any, config: Any, policy: Policy, batch: int, length: int) -> Any:
    """The loop of decode steps, lowered for the first device of a mesh, and its cache, as shapes.

    Sequences have `length` tokens in the end.
    """
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def on(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    def weight(shape: Any, axes: Any) -> Any:
        spec = spec_of(axes, shape.shape, mesh, config.num_kv_heads)
        at = format_of(axes, jax.sharding.NamedSharding(mesh, spec))
        return jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16, sharding=at)

    _, shapes, axes = structure(Llama, config)
    params = Params(jax.tree.map(weight, shapes, axes), Llama, config)
    grow = _GROW if policy.evicts else 0
    planned = plan(params, policy, [length] * batch, new=length - 1, grow=grow)

    def start() -> loops.Loop:
        cache = loops.empty_cache(params, planned.policy, jnp.array(planned.budgets), planned.slots)
        ended = jnp.zeros(batch, bool)
        return loops.Loop(cache, jnp.ones(batch, jnp.int32), ended, row_keys(0, batch), None)

    state, stops = on(jax.eval_shape(start)), on((jnp.array([-1]), jnp.int32(8)))
    with jax.set_mesh(mesh):
        lowered = loops.decode.program.lower(params, state, sampling(), *stops, planned.policy)
    return lowered, state.cache


def bytes_of(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@dataclasses.dataclass
class Compiler:
    """Compiles for one chip; notes what it said."""

    mesh: Any
    policy: Policy
    length: int
    #: By batch that fitted, bytes of arguments and temporaries; by batch that did not, what the
    #: compiler said.
    fitted: dict[int, dict[str, int]] = dataclasses.field(default_factory=dict)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)

    def fits(self, batch: int) -> bool:
        lowered, cache = decode_step(self.mesh, LLAMA_3_8B, self.policy, batch, self.length)
        try:
            memory = lowered.compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.refused[batch] = str(error).splitlines()[0]
            return False
        self.fitted[batch] = {
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "cache_bytes": bytes_of(cache),
        }
        return True


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest batch that fits, 0 if none does; larger ones than one that does not are taken not
    to either. The guess and what is beside it are tried first.
    """
    low, high = 0, None
    batch, step = max(1, guess), 1
    while high is None or high - low > 1:
        if fits(batch):
            low = batch
        else:
            high = batch
        if high is None:
            batch = low + step
        elif low == 0:
            batch = max(1, high - step)
        else:
            batch = (low + high) // 2
        step *= 2
    return low


def available(told: str) -> float | None:
    """The memory that a compiler which refused says there is, in bytes."""
    found = re.search(r"available HBM \(([0-9.]+)G\)", told)
    return float(found[1]) * _GIB if found else None


@functools.cache
def mesh_of(chip: str) -> Any:
    """A mesh of the first device of a chip's smallest topology.

    Raises:
      ValueError: the compiler is not installed, or does not know the chip.

    """
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(f"no compiler for {chip} (pip install 'jaxkv[aot]'): {told}") from None
    devices = np.array(found.devices[:1]).reshape(1, 1)
    return jax.sharding.Mesh(devices, ("data", "model"))


def measure(args: argparse.Namespace) -> Records:
    unknown = [chip for chip in args.chips if chip not in CHIPS]
    if unknown:
        raise ValueError(f"unknown chips: {', '.join(unknown)}; there are {', '.join(CHIPS)}")
    if args.snapkv is not None and not 0 < args.snapkv <= 1:
        raise ValueError(f"--snapkv must be in (0, 1], got {args.snapkv}")
    shared = made_up_plan(LLAMA_3_8B, args.share)
    # In bfloat16.
    weights = 2 * sum(x.size for x in jax.tree.leaves(structure(Llama, LLAMA_3_8B)[1]))
    records = Records(args, model="Llama-3-8B", share=args.share, saving=shared.saving)
    for chip in args.chips:
        for length in args.lengths:
            for name, policy in methods(shared, length, args.snapkv).items():
                compiler = Compiler(mesh_of(chip), policy, length)
                _, cache = decode_step(mesh_of(chip), LLAMA_3_8B, policy, 1, length)
                # Some of it is the system's.
                free = 0.977 * CHIPS[chip].gigabytes * _GIB - weights
                batch = largest(compiler.fits, int(free // bytes_of(cache)))
                record: dict[str, Any] = dict(compiler.fitted.get(batch, {}))
                refused = compiler.refused[batch + 1]
                records.add(
                    f"{chip}, {length} tokens, {name}: batch {batch}; for {batch + 1}: {refused}",
                    chip=chip,
                    length=length,
                    method=name,
                    batch=batch,
                    weights_bytes=weights,
                    sequence_bytes=bytes_of(cache),
                    available_bytes=available(refused),
                    refused=refused,
                    **record,
                )
    return records


def report(records: list[dict[str, Any]]) -> str:
    first = records[0]
    lines = [
        f"{first['model']}, bfloat16, one chip: the largest batch that decodes; PoD saves "
        f"{first['saving']:.1%} of the keys and values of endless texts.",
        "",
    ]
    full = {(r["chip"], r["length"]): r["batch"] for r in records if r["method"] == "full"}
    rows = []
    for r in records:
        whole = full[r["chip"], r["length"]]
        memory = r["available_bytes"]
        rows.append(
            [
                r["chip"],
                r["length"],
                r["method"],
                r["batch"] or "does not fit",
                f"{r['batch'] / whole - 1:+.0%}" if whole and r["batch"] else "",
                f"{r['sequence_bytes'] / _GIB:.2f}",
                f"{r['temporary_bytes'] / _GIB:.2f}" if r["batch"] else "",
                "" if memory is None else f"{memory / _GIB:.2f}",
            ]
        )
    titles = ["chip", "tokens", "method", "batch", "more", "GiB a sequence", "temporary GiB"]
    return "\n".join([*lines, table([*titles, "GiB of the chip"], rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__ or "")
    made.add_argument("--chips", nargs="+", default=None, metavar="NAME", help="default: v6e v5p")
    made.add_argument("--snapkv", type=float, metavar="SHARE", help="of the tokens, kept by SnapKV")
    add_options(made, OPTIONS)
    args = parse(made, OPTIONS, arguments)
    args.chips = args.chips or (["v6e"] if args.quick else ["v6e", "v5p"])
    # The compiler would look for chips.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    jax.config.update("jax_platforms", "cpu")
    run(made, lambda: print(report(measure(args).all)))


if __name__ == "__main__":
    main()
