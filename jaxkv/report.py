"""What generation kept and what it cost."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxkv.cache import Cache
from jaxkv.models.params import Params
from jaxkv.pallas_kernels.dispatch import chosen_on
from jaxkv.policies.base import Policy
from jaxkv.shared import SharedLayer


@dataclasses.dataclass(frozen=True)
class Report:
    """What happened to the cache, and how long it took.

    Lists have one entry per sequence. Tokens are counted per KV head; where the heads of a layer
    keep different numbers it is their mean.
    """

    policy: str
    prompt_tokens: list[int]
    new_tokens: list[int]
    #: Resolved budget (of the heads, on average); None when every token is kept and read.
    budget: list[int | None]
    #: How the budget divides, e.g. `{"heavy": [10], "recent": [10]}`.
    split: dict[str, list[int]]
    #: Tokens stored at the end, [sequence][layer].
    kept: list[list[int]]
    #: Tokens dropped on the way, [sequence][layer].
    evicted: list[list[int]]
    #: Slots allocated per KV head, [layer]: the largest budget, one free slot, and padding. In a
    #: pool, of all KV heads together.
    slots: list[int]
    #: Bytes of each layer of the live cache, and of all of it.
    layer_bytes: list[int]
    cache_bytes: int
    #: Bytes of the keys and values of every token seen: what dropping nothing would need.
    full_bytes: int
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    #: Which implementation served each operation, see `jaxkv.kernels`.
    kernels: dict[str, str]
    #: Of the distant parts of decode steps that read another layer's keys, the share that was
    #: skipped; None where none may be.
    skipped: float | None
    #: Things worth knowing about this run.
    notes: list[str]

    @property
    def evictions(self) -> int:
        """Tokens dropped, over all sequences and layers."""
        return sum(map(sum, self.evicted))

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of prompt and decoding together, compiling left out (as in the
        H2O paper).
        """
        return sum(self.new_tokens) / max(self.prefill_seconds + self.decode_seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens per second of decoding alone; the first token comes from the prompt."""
        return sum(n - 1 for n in self.new_tokens) / max(self.decode_seconds, 1e-9)

    def __str__(self) -> str:
        kept, evicted = ([row[0] for row in rows] for rows in (self.kept, self.evicted))
        seen = [k + e for k, e in zip(kept, evicted, strict=True)]
        parts = ", ".join(f"{name} {_few(values)}" for name, values in self.split.items())
        budget = "none" if self.budget[0] is None else f"{_few(self.budget)} tokens ({parts})"
        lines = [
            f"policy    {self.policy}",
            f"budget    {budget}",
            f"tokens    {_few(self.prompt_tokens)} prompt + {_few(self.new_tokens)} new",
            f"kept      {_few(kept)} of the {_few(seen)} tokens seen, per KV head"
            + ("" if len({tuple(row) for row in self.kept}) == 1 else " of the first layer"),
            f"cache     {self.cache_bytes / 1e6:.2f} MB in {_few(self.slots)} slots; "
            f"all keys and values: {self.full_bytes / 1e6:.2f} MB",
            f"seconds   compile {self.compile_seconds:.2f}, prompt {self.prefill_seconds:.2f}, "
            f"decode {self.decode_seconds:.2f}",
            f"speed     {self.decode_tokens_per_second:.1f} tokens/s decoding, "
            f"{self.tokens_per_second:.1f} with the prompt",
            "kernels   " + ", ".join(f"{name} {which}" for name, which in self.kernels.items()),
        ]
        if self.skipped is not None:
            lines.append(f"skipped   {self.skipped:.0%} of the distant parts of decode steps")
        return "\n".join(lines + [f"note      {note}" for note in self.notes])


def _few(values: Sequence[object]) -> str:
    """One value if all are equal, else all of them."""
    return str(values[0]) if len(set(values)) == 1 else "/".join(map(str, values))


def make_report(
    params: Params,
    policy: Policy,
    cache: Cache,
    *,
    prompt_tokens: list[int],
    new_tokens: list[int],
    budgets: list[int],
    first_turn: bool,
    seconds: dict[str, float],
) -> Report:
    """Reads a cache and says what is in it."""
    config = params.config
    # [layer][sequence]
    stored = np.stack([np.asarray(layer.stored()).mean(-1) for layer in cache.layers])
    stored = np.round(stored).astype(int)
    seen = np.asarray(cache.length)
    evicted = seen[None] - stored
    layer_bytes = [sum(x.nbytes for x in jax.tree.leaves(layer)) for layer in cache.layers]
    per_token = 2 * config.num_kv_heads * config.head_dim * params.dtype.itemsize
    bounded = policy.evicts or policy.selects != "all"
    splits = [policy.split(budget) for budget in budgets] if bounded else []
    return Report(
        policy=policy.name or type(policy).__name__,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        budget=[budget if bounded else None for budget in budgets],
        split={name: [split[name] for split in splits] for name in (splits[0] if splits else {})},
        kept=stored.T.tolist(),
        evicted=evicted.T.tolist(),
        slots=[layer.slots for layer in cache.layers],
        layer_bytes=layer_bytes,
        cache_bytes=cache.nbytes,
        full_bytes=int(seen.sum()) * per_token * config.num_layers,
        compile_seconds=seconds["compile"],
        prefill_seconds=seconds["prefill"],
        decode_seconds=seconds["decode"],
        kernels=chosen_on(next(iter(cache.length.devices())).platform),
        skipped=_skipped(cache),
        notes=_notes(policy, budgets, prompt_tokens if first_turn else None, evicted)
        + _sharing_notes(policy, seen),
    )


def _skipped(cache: Cache) -> float | None:
    """The share of distant parts that steps have skipped."""
    layers = [layer for layer in cache.layers if isinstance(layer, SharedLayer)]
    counts = [layer.skipped() for layer in layers]
    found = [np.asarray(count).sum((0, 1)) for count in counts if count is not None]
    if not found:
        return None
    skipped, all_of_them = np.sum(found, 0).tolist()
    return skipped / max(all_of_them, 1)


def _sharing_notes(policy: Policy, seen: np.ndarray) -> list[str]:
    sharing = policy.sharing
    if sharing is None or sharing.values or seen.max() > sharing.near:
        return []
    return [
        f"no key was shared: all of {_few(seen.tolist())} tokens are among the {sharing.near} near "
        "ones; give fewer sinks and recent"
    ]


_SMALL_BUDGET = 16


def _notes(
    policy: Policy, budgets: list[int], prompt_tokens: list[int] | None, evicted: np.ndarray
) -> list[str]:
    policy = policy.keeper
    if not policy.evicts:
        if policy.selects != "all":
            return [f"{policy.name} keeps every token and reads part of them at each step"]
        unused = policy.budget != type(policy)().budget
        told = f"{policy.name} keeps every token: the budget of {policy.budget} was not used"
        return [told] if unused else []
    notes = []
    if not evicted.any():
        notes.append(
            f"nothing was evicted: the budget of {_few(budgets)} tokens was never exceeded"
        )
    elif prompt_tokens and isinstance(policy.budget, float) and min(budgets) < _SMALL_BUDGET:
        i = int(np.argmin(budgets))
        notes.append(
            f"budget {policy.budget} of a prompt of {prompt_tokens[i]} tokens is {budgets[i]} "
            "tokens: a fraction of a short prompt leaves little; give a number of tokens instead"
        )
    return notes
