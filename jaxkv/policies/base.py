"""The contract of a policy: an order on tokens, and how many of them each layer keeps.

A policy is a frozen dataclass: hashable, and static under `jax.jit`. What it must say is

- `priority(tokens)`: which tokens are worth more. The cache drops those of lowest priority;
  among equals the older one stays. `jnp.inf` protects a token. The newest token is always kept,
  whatever its priority.

and what it may say, each with a default:

- `drops`: when tokens are dropped: "always" (the default), or only when a "prompt" is read, or at
  steps in "bursts", or "never".
- `needs_scores`, `statistics`, `remember(tokens)`: what is collected from attention, and what is
  remembered of it per token. By default, if scores are needed, the sum of all attention received.
- `needs_traits`, `trait(new)`: one number per token, computed when it comes.
- `resolve(length)`, `budgets(...)`: how many tokens each KV head of each layer keeps.
- `pooled`, `allot(...)`: heads of a layer share its budget, see `jaxkv.pool`.
- `selects`, `select(...)`: a decode step reads only some of the stored tokens.
- `positions`: "original", "rolling" or "ceiling", see `jaxkv.positions`.

A policy of one's own is a subclass that gives `priority`; `register` lends it a name.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache import UNBOUNDED, Cache
from jaxkv.positions import POSITION_MODES, Rotary
from jaxkv.shared import Sharing
from jaxkv.statistics import ColumnSums, Statistic


class Tokens(NamedTuple):
    """What a policy may look at: the tokens that compete for the slots of one layer.

    Candidates are the stored tokens, and after a block of new tokens the block's as well, in no
    particular order. Empty slots have position -1 and are never kept, whatever their priority.
    Keys are rotated under "original" positions and unrotated under the others.
    """

    positions: Int[Array, "batch kv_heads candidates"]
    #: What `remember` made of each token's attention; float32, None unless `needs_scores`.
    scores: Float[Array, "batch kv_heads candidates"] | None
    #: The policy's number for each token; None unless `needs_traits`.
    traits: Float[Array, "batch kv_heads candidates"] | None
    #: What the policy's `statistics` collected from the tokens that just came, in their order.
    received: tuple[Float[Array, "batch kv_heads candidates"], ...]
    #: Position of the newest token of each sequence.
    newest: Int[Array, "batch 1 1"]
    #: Tokens that each KV head may store.
    budget: Int[Array, "batch kv_heads 1"]
    keys: Float[Array, "batch kv_heads candidates dim"]
    values: Float[Array, "batch kv_heads dim candidates"]
    #: Keys as the new tokens attend to them: rotated under all position modes.
    turned_keys: Float[Array, "batch kv_heads candidates dim"]
    #: The last queries, rotated, the newest last; None unless `recent_queries`.
    queries: Float[Array, "batch kv_heads group recent dim"] | None
    #: Which layer this is, counted from 0; an int32 scalar.
    layer: Int[Array, ""]
    #: A decode step (one new token per sequence), not a block.
    step: bool
    #: The tokens that just came.
    new: "New"

    @property
    def age(self) -> Int[Array, "batch kv_heads candidates"]:
        """How many tokens ago each candidate was the newest: 0 for the newest itself."""
        return self.newest - self.positions


class New(NamedTuple):
    """The tokens that came last, as the model computed them."""

    #: Before rotation; `turned` are the same rotated, as they attend.
    queries: Float[Array, "batch kv_heads group t dim"]
    turned: Float[Array, "batch kv_heads group t dim"]
    keys: Float[Array, "batch kv_heads t dim"]
    values: Float[Array, "batch kv_heads dim t"]
    #: -1 is padding.
    positions: Int[Array, "batch t"]
    rotary: Rotary | None
    #: The model's own sliding window in tokens, if it has one.
    window: int | None
    #: Weight of the output projection, heads * dim last; None where a model gives none.
    output: Float[Array, "embed heads_dim"] | None
    layer: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies.

    Attributes:
      budget: tokens kept per KV head: an int, or a float for the fraction of the sequence's own
        prompt length (rounded to the nearest token, at least 1).
      positions: "original" (tokens keep their positions in the text) or "rolling" (a token sits at
        its rank among those kept, so that a text may go on for ever).

    Raises:
      ValueError: the budget is not an int >= 1 or a float in (0, 1].

    """

    budget: int | float = 0.2
    positions: str = dataclasses.field(default="original", kw_only=True)

    #: What the policy is called by, what it keeps and what memory it frees in a few words, and
    #: where the rule is from.
    name: ClassVar[str] = ""
    keeps: ClassVar[str] = ""
    frees: ClassVar[str] = "all but the budget"
    source: ClassVar[str] = ""
    #: "always": at every token. "prompt": when a block is read, while steps let the cache grow.
    #: "bursts": steps let it grow by `burst` tokens, then it is cut. "never".
    drops: ClassVar[Literal["always", "prompt", "bursts", "never"]] = "always"
    needs_scores: ClassVar[bool] = False
    needs_traits: ClassVar[bool] = False
    #: Heads of a layer may keep different numbers of tokens.
    pooled: ClassVar[bool] = False
    #: `remember` and `priority` look at each token by itself, so that at steps a pool can be judged
    #: as one row, whose `budget` is that of each slot's head.
    tokenwise: ClassVar[bool] = False
    #: What a decode step reads: everything stored, what `select` marks, or pages (`PageReader`).
    selects: ClassVar[Literal["all", "slots", "pages"]] = "all"
    #: The prompt is read by `reader()`, which keeps every token, and is cut when it has been read.
    afterwards: ClassVar[bool] = False
    #: `weigh` notes what each layer is worth.
    weighs_layers: ClassVar[bool] = False
    #: So many of the last queries are at hand at every step.
    recent_queries: ClassVar[int] = 0
    #: New tokens enter the cache (False for a policy that only watches).
    stores: ClassVar[bool] = True
    #: Attention of a whole text is computed by `simulate`: for scoring given texts only.
    simulates: ClassVar[bool] = False
    #: The rule has numbers for certain heads of certain layers.
    by_number: ClassVar[bool] = False
    #: The fewest tokens the rule can work with.
    minimum: ClassVar[int] = 1
    #: For "ceiling" positions: a bound of `limit`, if it does not follow from the budget.
    max_distance: ClassVar[int | None] = None
    #: Tokens that steps may add before a cut, for "bursts".
    burst: ClassVar[int] = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Policy.__repr__  # type: ignore[method-assign]
        mode = cls.__dict__.get("positions")
        if isinstance(mode, str):
            # `positions = "rolling"` in a class body, annotated or not, is the field's default.
            cls.__annotations__ = {**inspect.get_annotations(cls), "positions": str}
            cls.positions = dataclasses.field(default=mode, kw_only=True)

    def __post_init__(self) -> None:
        mode = getattr(type(self), "positions", None)
        if isinstance(mode, dataclasses.Field):  # a subclass that is not decorated
            object.__setattr__(self, "positions", mode.default)
        object.__setattr__(self, "budget", _plain(self.budget))
        check_budget(self.budget)
        if self.positions not in POSITION_MODES:
            raise ValueError(f"positions must be one of {POSITION_MODES}, got {self.positions!r}")
        if isinstance(self.budget, int):
            self.resolve(0)
        if self.positions == "ceiling" and type(self).limit is Policy.limit:
            raise ValueError(f"positions='ceiling' is for policies with a limit, not {self!r}")

    def __repr__(self) -> str:
        """The budget, and what differs from the defaults."""
        shown = []
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if field.name == "budget" or value != default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        """What each candidate is worth, as float32: higher is kept, `jnp.inf` is protected."""
        raise NotImplementedError(f"{type(self).__name__} must define priority(tokens)")

    def limit(self, budget: Any) -> Any:
        """The distance at which far tokens are seen under "ceiling" positions, for a budget."""
        raise NotImplementedError(f"{type(self).__name__} has no limit(budget)")

    @property
    def evicts(self) -> bool:
        """Whether tokens are ever dropped."""
        return self.drops != "never"

    @property
    def accumulates(self) -> bool:
        """Scores are sums of the one statistic, so that attention may add to them itself."""
        return self.needs_scores and type(self).remember is Policy.remember

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What to collect from attention."""
        return (ColumnSums(),) if self.needs_scores else ()

    def collect(self, step: bool) -> tuple[Statistic, ...]:
        """`statistics`, for policies that ask for others at decode steps than in blocks."""
        del step
        return self.statistics

    def remember(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        """The new scores, from the old ones (0 for new tokens) and what was received."""
        assert tokens.scores is not None
        return tokens.scores + tokens.received[0]

    def trait(self, new: New) -> Float[Array, "batch kv_heads t"]:
        """A number for each new token."""
        raise NotImplementedError(f"{type(self).__name__} must define trait(new)")

    def select(
        self, tokens: Tokens, queries: Float[Array, "batch kv_heads group dim"]
    ) -> Bool[Array, "batch kv_heads #group candidates"]:
        """Which stored tokens a decode step reads; `queries` are rotated."""
        raise NotImplementedError(f"{type(self).__name__} must define select(tokens, queries)")

    def simulate(
        self,
        queries: Float[Array, "batch kv_heads group t dim"],
        keys: Float[Array, "batch kv_heads t dim"],
        values: Float[Array, "batch kv_heads dim t"],
        budget: Int[Array, "batch kv_heads"],
    ) -> Float[Array, "batch kv_heads group t dim"]:
        """The attention of a whole text, without padding, as it would be under the rule."""
        raise NotImplementedError(f"{type(self).__name__} must define simulate")

    def allot(
        self,
        priority: Float[Array, "batch kv_heads candidates"],
        positions: Int[Array, "batch kv_heads candidates"],
        budget: Int[Array, "batch kv_heads"],
    ) -> Int[Array, "batch kv_heads"]:
        """How the heads of a layer share the sum of `budget`; for pooled policies."""
        del priority, positions
        return budget

    def weigh(self, tokens: Tokens) -> Float[Array, "batch kv_heads"]:
        """What the heads of a layer are worth; for policies that weigh layers."""
        raise NotImplementedError(f"{type(self).__name__} must define weigh(tokens)")

    @property
    def sharing(self) -> Sharing | None:
        """Which layers read the keys of others; None where each has its own."""
        return None

    @property
    def keeper(self) -> "Policy":
        """The policy by which heads that read their own keys keep tokens."""
        return self

    def weights(self, params: Any) -> Any:
        """The weights (`jaxkv.Params`) that compiled programs run with."""
        return params.weights()

    def reader(self) -> "Policy":
        """Reads the prompt, for a policy that cuts it afterwards."""
        raise NotImplementedError(f"{type(self).__name__} must define reader()")

    def share(self, cache: Cache, budgets: Int[np.ndarray, "l b k"]) -> Int[np.ndarray, "l b k"]:
        """How layers and heads share the budgets once a prompt has been read, on the host; for
        policies that cut afterwards.
        """
        del cache
        return budgets

    def prepare(self, params: Any) -> "Policy":
        """The policy for a model (`jaxkv.Params`), where it depends on one."""
        del params
        return self

    def questions(self, params: Any, rows: Any) -> Iterable[list[list[int]]]:
        """Texts, one row of token ids per sequence, that look at what was read before it is cut."""
        del params, rows
        return ()

    def watcher(self) -> "Policy":
        """The policy under which `questions` look."""
        raise NotImplementedError(f"{type(self).__name__} must define watcher()")

    def page_of(self, layer: int) -> int | None:
        """Slots of a page of a layer; None where it is read whole."""
        del layer
        return None

    def resolve(self, length: int) -> int:
        """Tokens per KV head for a sequence whose prompt has `length` tokens.

        Raises:
          ValueError: fewer than the rule can work with.

        """
        budget, told = self.budget, f"a budget of {self.budget}"
        if not isinstance(budget, int):
            budget = max(1, round(budget * length))
            told = f"a budget of {self.budget} of a prompt of {length} tokens is {budget}, which"
        if budget < self.minimum:
            raise ValueError(
                f"{told} is below what {self.name or type(self).__name__} needs: "
                f"at least {self.minimum} tokens ({self!r})"
            )
        return int(budget)

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        """Tokens that each KV head of each layer keeps for a prompt of `length` tokens; they sum to
        `resolve(length) * num_layers * kv_heads`. `UNBOUNDED` marks heads that keep everything.
        Policies that read less give what is read.
        """
        bounded = self.evicts or self.selects != "all" or self.simulates
        budget = self.resolve(length) if bounded else UNBOUNDED
        return np.full((num_layers, kv_heads), budget)

    def split(self, budget: int) -> dict[str, int]:
        """How a resolved budget divides into named parts; for reports."""
        return {"tokens": budget}

    def with_budget(self, budget: int | float) -> "Policy":
        """The same policy with another budget."""
        return dataclasses.replace(self, budget=budget)


def _plain(budget: Any) -> Any:
    """NumPy's integers as Python's."""
    return int(budget) if isinstance(budget, np.integer) else budget


def check_budget(budget: object) -> None:
    """Raises `ValueError` unless `budget` is an int >= 1 or a float in (0, 1]."""
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1:
        return
    if isinstance(budget, float) and 0 < budget <= 1:
        return
    raise ValueError(f"budget must be an int >= 1 or a float in (0, 1], got {budget!r}")


def protect(protected: Array, priority: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`priority`, with the tokens marked `protected` above all others."""
    return jnp.where(protected, jnp.inf, priority)


_REGISTRY: dict[str, type[Policy]] = {}
#: Policies that a name is not enough for.
_WITH_A_PLAN = {
    "pod": "jaxkv.PoD(plan), with a plan of jaxkv.pod.explore",
    "cla": "jaxkv.CLA(plan), with a plan such as jaxkv.PodPlan.every(2, params.config)",
    "minicache": "jaxkv.MiniCache(plan), with a plan such as jaxkv.PodPlan.every(2, params.config, "
    "start=params.config.num_layers // 2)",
}


def register(policy: type[Policy]) -> type[Policy]:
    """Class decorator: makes a policy available under its `name`."""
    if not policy.name:
        raise ValueError(f"{policy.__name__} needs a class attribute `name` to be registered")
    _REGISTRY[policy.name] = policy
    return policy


def registered() -> dict[str, type[Policy]]:
    """Name -> policy class, in the order of registration."""
    return dict(_REGISTRY)


def get_writer(policy: "str | Policy", budget: int | float | None = None) -> Policy:
    """`get`, for use where tokens are generated.

    Raises:
      ValueError: as `get`, or the policy only scores given texts.

    """
    chosen = get(policy, budget)
    if chosen.simulates:
        raise ValueError(f"{chosen!r} only scores given texts: use it with jaxkv.perplexity")
    return chosen


def get(policy: "str | Policy", budget: int | float | None = None) -> Policy:
    """A policy from its name or itself, with `budget` in place of its own if one is given.

    Raises:
      ValueError: no policy has that name, or the budget does not suit it.

    """
    if isinstance(policy, str):
        if policy in _WITH_A_PLAN:
            raise ValueError(
                f"{policy!r} needs a plan of which layers share: give policy={_WITH_A_PLAN[policy]}"
            )
        if policy not in _REGISTRY:
            near = difflib.get_close_matches(policy, _REGISTRY, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown policy {policy!r}{hint}; policies: {', '.join(_REGISTRY)}")
        return _REGISTRY[policy]() if budget is None else _REGISTRY[policy](budget=budget)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be a name or a jaxkv.Policy, got {policy!r}")
    return policy if budget is None else policy.with_budget(budget)
