"""One step of training under a policy's attention: loss, optimiser, and where arrays lie."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxkv.loops import module_of
from jaxkv.models.base import flatten, map_with_path
from jaxkv.models.params import Params
from jaxkv.pod.whole import Texts, Whole
from jaxkv.policies.base import Policy
from jaxkv.policies.static import Full, Streaming, Window
from jaxkv.sharding import constrain

#: Tokens whose logits are in memory at once.
_LOGITS_AT_ONCE = 256
#: What "attention" trains, by the names of the families.
_ATTENTION = ("self_attn.", "attention.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. Static.

    Attributes:
      policy: whose attention the model learns: `jaxkv.PoD`, `jaxkv.Window` or `jaxkv.Streaming`
        (their budgets as a sliding mask), `jaxkv.CLA`, or `jaxkv.Full`.
      steps: updates in all.
      learning_rate: the highest; reached after `warmup` updates, then falls along a cosine to a
        tenth.
      warmup: updates; by default 10, or a quarter of all if these are fewer than 40.
      accumulate: batches per update.
      clip: largest norm of a gradient.
      weight_decay: of AdamW, on matrices.
      distill: weight of the divergence from the dense model's own predictions (KL, per token); the
        cross entropy of the next token has the rest, 1 - distill.
      remat: in a gradient, blocks are computed again rather than remembered: more time by a
        quarter, and memory for one block instead of all.
      trains: "attention" (its projections, and maps of far queries) or "all" weights.

    """

    policy: Policy
    steps: int
    learning_rate: float = 1e-4
    warmup: int | None = None
    accumulate: int = 1
    clip: float = 1.0
    weight_decay: float = 0.0
    distill: float = 1.0
    remat: bool = True
    trains: Literal["attention", "all"] = "attention"

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an int >= 1, got {value!r}")
        if self.warmup is None:
            object.__setattr__(self, "warmup", min(10, self.steps // 4))
        if type(self.warmup) is not int or not 0 <= self.warmup <= self.steps:
            raise ValueError(
                f"warmup must be an int from 0 to steps={self.steps}, got {self.warmup!r}"
            )
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)!r}")
        if not 0 <= self.distill <= 1:
            raise ValueError(f"distill must be a number in [0, 1], got {self.distill!r}")
        if self.trains not in ("attention", "all"):
            raise ValueError(f"trains must be 'attention' or 'all', got {self.trains!r}")
        attention_of(self.policy)

    def rate(self) -> Any:
        """The learning rate by update."""
        import optax

        assert self.warmup is not None
        schedule = optax.warmup_cosine_decay_schedule(
            0.0 if self.warmup else self.learning_rate,
            self.learning_rate,
            self.warmup,
            max(self.steps, self.warmup + 1),
            self.learning_rate / 10,
        )
        # Counted from 0, and the first update should do something.
        return lambda count: schedule(count + 1)

    def optimizer(self) -> Any:
        """An optax optimiser."""
        import optax

        def matrices(tree: Any) -> Any:
            return jax.tree.map(lambda x: x.ndim > 1, tree)

        adam = optax.adamw(self.rate(), b2=0.95, weight_decay=self.weight_decay, mask=matrices)
        chain = optax.chain(optax.clip_by_global_norm(self.clip), adam)
        return optax.MultiSteps(chain, self.accumulate) if self.accumulate > 1 else chain


def attention_of(policy: Policy) -> dict[str, Any]:
    """What `Whole` must know to attend as a policy does over a whole text.

    Raises:
      ValueError: the policy's attention has no such form.

    """
    sharing = policy.sharing
    if sharing is not None and not sharing.merge and not policy.keeper.evicts:
        return {"sharing": sharing}
    if type(policy) is Full:
        return {}
    sliding = type(policy) in (Window, Streaming) and policy.positions == "original"
    if sliding and isinstance(policy.budget, int):
        sinks = policy.sinks if isinstance(policy, Streaming) else 0
        # A step attends to what is stored and to itself.
        return {"window": policy.budget - sinks + 1, "sinks": sinks}
    raise ValueError(
        "training is for jaxkv.PoD and jaxkv.CLA (with nothing dropped), jaxkv.Window and "
        "jaxkv.Streaming (with a number of tokens as budget, and positions='original'), and "
        f"jaxkv.Full; got {policy!r}"
    )


def split(params: Params, recipe: Recipe) -> dict[str, Array]:
    """The weights that are trained, by path."""
    flat = flatten(params.state)
    if recipe.trains == "all":
        return flat
    return {path: leaf for path, leaf in flat.items() if any(part in path for part in _ATTENTION)}


def joined(params: Params, trained: Mapping[str, Array]) -> Params:
    """A model with these weights in the places of its own, in its dtype."""
    state = map_with_path(
        lambda path, leaf: trained[path].astype(leaf.dtype) if path in trained else leaf,
        params.state,
    )
    return dataclasses.replace(params, state=state)


def losses(
    params: Params, teacher: Params | None, texts: Texts, recipe: Recipe
) -> dict[str, Float[Array, ""]]:
    """Means per predicted token: cross entropy of the next one, and the divergence from the
    teacher, in nats; and how many tokens were predicted.
    """
    hidden = _hidden(params, texts, recipe.remat, **attention_of(recipe.policy))
    module = module_of(params)
    follows = texts.documents[:, 1:] == texts.documents[:, :-1]
    real = jnp.pad(follows & (texts.documents[:, 1:] >= 0), ((0, 0), (0, 1))).reshape(-1)
    target = jnp.roll(texts.tokens, -1, 1).reshape(-1)
    taught = jnp.zeros_like(hidden)
    head = module
    if teacher is not None:
        taught = lax.stop_gradient(_hidden(teacher, texts, remat=False))
        head = module_of(teacher)

    @jax.checkpoint
    def part(arrays: Any) -> tuple[Array, Array]:
        x, y, target, real = arrays
        logp = jax.nn.log_softmax(module.unembed(x).astype(jnp.float32))
        chosen = jnp.take_along_axis(logp, target[:, None], 1)[:, 0]
        entropy = -jnp.sum(jnp.where(real, chosen, 0.0))
        if teacher is None:
            return entropy, jnp.float32(0)
        logq = lax.stop_gradient(jax.nn.log_softmax(head.unembed(y).astype(jnp.float32)))
        apart = jnp.sum(jnp.exp(logq) * (logq - logp), -1)
        return entropy, jnp.sum(jnp.where(real, apart, 0.0))

    count = real.size
    at_once = min(_LOGITS_AT_ONCE, count)

    def in_parts(x: Array) -> Array:
        padded = jnp.pad(x, ((0, -count % at_once), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, at_once, *x.shape[1:])

    flat = (hidden.reshape(count, -1), taught.reshape(count, -1), target, real)
    parts = jax.tree.map(in_parts, flat)
    entropy, apart = (jnp.sum(x) for x in lax.map(part, parts))
    predicted = jnp.maximum(jnp.sum(real), 1)
    return {
        "cross_entropy": entropy / predicted,
        "divergence": apart / predicted,
        "predicted": jnp.sum(real),
    }


def _hidden(
    params: Params, texts: Texts, remat: bool, **attention: Any
) -> Float[Array, "batch t embed"]:
    module, config = module_of(params), params.config
    new = texts.as_new(config.rotary_embedding)
    layers = Whole.layers(texts, config.num_layers, **attention)
    x = module.embed(texts.tokens, jnp.maximum(texts.positions, 0))
    x = constrain(x, ("batch", "tokens", None))
    return module.run_blocks(x, layers, new, Full(), remat=remat)[0]


@functools.partial(jax.jit, static_argnames=("recipe",), donate_argnames=("trained", "state"))
def update(
    trained: dict[str, Array],
    state: Any,
    params: Params,
    teacher: Params | None,
    texts: Texts,
    recipe: Recipe,
) -> tuple[dict[str, Array], Any, dict[str, Array]]:
    """One batch: the weights, the optimiser's state, and what happened."""
    import optax

    def loss(trained: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        found = losses(joined(params, trained), teacher, texts, recipe)
        weighed = recipe.distill * found["divergence"]
        return weighed + (1 - recipe.distill) * found["cross_entropy"], found

    (value, found), slope = jax.value_and_grad(loss, has_aux=True)(trained)
    updates, state = recipe.optimizer().update(slope, state, trained)
    told = {"loss": value, "gradient_norm": optax.tree.norm(slope), **found}
    return optax.apply_updates(trained, updates), state, told


def placed(tree: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Arrays divided over the "data" axis of a mesh along their longest dimension that it divides
    (FSDP): each device holds a part of every weight and of the optimiser's state.
    """
    if mesh is None:
        return tree
    ways = mesh.shape["data"]

    def place(leaf: Array) -> Array:
        fits = [(size, axis) for axis, size in enumerate(leaf.shape) if size % ways == 0]
        spec = [None] * leaf.ndim
        if fits and ways > 1:
            spec[max(fits)[1]] = "data"  # type: ignore[call-overload]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, tree)
