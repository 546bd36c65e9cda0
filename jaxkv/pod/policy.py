"""`PoD`: distant tokens of similar layers share one set of keys; nothing is dropped for it."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxkv.models.params import Params
from jaxkv.pod.plan import PodPlan
from jaxkv.policies.base import Policy
from jaxkv.policies.static import Full
from jaxkv.policies.wrapper import Wrapper
from jaxkv.shared import SKIP_FORMS, Sharing


@dataclasses.dataclass(frozen=True)
class Sharer(Wrapper):
    """What policies have in common under which layers share, as a plan says."""

    plan: PodPlan = None  # type: ignore[assignment]
    of: Policy = dataclasses.field(default=Full(), kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.plan, PodPlan):
            raise ValueError(f"plan must be a jaxkv.PodPlan, got {self.plan!r}")
        super().__post_init__()
        check_shareable(self, self.of)

    @property
    def keeper(self) -> Policy:
        return self.of

    def prepare(self, params: Params) -> Policy:
        self.plan.check(params.config)
        return super().prepare(params)

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        own = self.of.budgets(length, num_layers, kv_heads)
        return np.take_along_axis(own, np.array(self.plan.root), 0)


@dataclasses.dataclass(frozen=True)
class PoD(Sharer):
    """Keys of near tokens in every layer, keys of distant ones only in a plan's roots, all values
    (arXiv 2412.02252).

    A query meets a near token's key of its own layer, and a distant token's of the root, under one
    softmax: logit(i, j) = q_i . (near ? k_j : k_root,j) / sqrt(d). Token j is near to i if
    j < sinks or i - j < recent. Keys are shared after rotation, since positions are the same in
    all layers.

    Attributes:
      plan: from `jaxkv.pod.explore`.
      sinks, recent: near tokens; 16 + 4080 in the paper.
      skip: leaves out the far part of a decode step where the near part has at least this share of
        the softmax in all query heads of a KV head: `("exact", 0.7)` computes the far logits and
        reads no values, `("predicted", 0.7)` reads neither, and goes by the root's far part at the
        same step.
      of: which tokens are kept at all (by default all of them); heads that follow a root keep the
        tokens that the root keeps.

    Raises:
      ValueError: an argument is out of range, or `of` cannot be shared.

    """

    sinks: int = 16
    recent: int = 4080
    skip: tuple[str, float] | None = None

    name: ClassVar[str] = "pod"
    keeps: ClassVar[str] = "every token; distant keys once per block of similar layers"
    source: ClassVar[str] = "PoD, arXiv 2412.02252"
    frees: ClassVar[str] = "distant keys of layers that follow another"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("sinks", 0), ("recent", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        if self.skip is not None:
            _check_skip(self.skip)

    @property
    def sharing(self) -> Sharing:
        own = (self.plan.root, self.sinks, self.recent, self.skip)
        return Sharing(*own, evicts=self.of.evicts)

    def prepare(self, params: Params) -> Policy:
        prepared = super().prepare(params)
        near, most = self.sinks + self.recent, params.config.max_positions
        if near > most:
            raise ValueError(
                f"sinks={self.sinks} and recent={self.recent} are {near} near tokens, and "
                f"{params.name or 'the model'} has {most} positions: no token would be distant; "
                "give fewer"
            )
        return prepared

    def weights(self, params: Params) -> Params:
        if self.plan.maps is None or params.config.far_maps:
            return params.weights()
        return with_maps(params.weights(), self.plan.maps)

    def split(self, budget: int) -> dict[str, int]:
        return {**self.of.split(budget), "near": self.sinks + self.recent}


def with_maps(params: Params, maps: Any) -> Params:
    """A model whose queries are multiplied by `maps` `[layers, heads, dim, dim]` where they meet
    the keys of another layer.
    """
    config = dataclasses.replace(params.config, far_maps=True)
    like = jax.tree.leaves(params.state)[0].dtype
    layers = {}
    for index, layer in params.state["layers"].items():
        (name,) = [name for name in layer if name in ("self_attn", "attention")]
        own = {"far_map": jnp.asarray(maps[int(index)], like)}
        layers[index] = {**layer, name: {**layer[name], **own}}
    return dataclasses.replace(params, state={**params.state, "layers": layers}, config=config)


def _check_skip(skip: Any) -> None:
    form, tau = skip if isinstance(skip, tuple) and len(skip) == 2 else (None, 0)
    number = isinstance(tau, int | float) and not isinstance(tau, bool)
    if form not in SKIP_FORMS or not number or tau <= 0:
        raise ValueError(
            f"skip must be None or a form ({', '.join(SKIP_FORMS)}) and a share above 0, such as "
            f"('exact', 0.7), got {skip!r}"
        )


def check_shareable(sharer: Policy, of: Policy) -> None:
    """Raises `ValueError` for policies whose heads cannot keep what a root keeps."""
    reasons = {
        "it shares already": of.sharing is not None,
        "heads share a pool of slots": of.pooled,
        "it cuts a prompt after all layers have read it": of.afterwards,
        "it shares budgets between layers by what they attend to": of.weighs_layers,
        f"its positions are {of.positions}, and keys are shared as they were rotated": (
            of.positions != "original"
        ),
        "it knows the heads of a layer by number": of.by_number,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{type(sharer).__name__} cannot be combined with {of!r}: {reason}")
