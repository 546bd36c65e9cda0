"""`repair`: what sharing breaks, mended without training the model.

A query that meets a distant token's key finds that of another layer there. It may differ from the
query that near keys are met with, at no cost in the cache: q_far = rotate(q M), one matrix per
query head. Matrices are fitted layer by layer so that attention under the plan gives what the
layer's own attention gives in the dense model; nothing is propagated back through the network.
(Ours; not in the paper.)
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxkv.extend import NewTokens
from jaxkv.follow import turned
from jaxkv.models.base import structure
from jaxkv.models.params import Params
from jaxkv.pod.plan import PodPlan
from jaxkv.pod.texts import check_length, cut
from jaxkv.pod.whole import Texts, Whole, attend_whole, map_queries
from jaxkv.policies.static import Full
from jaxkv.progress import each
from jaxkv.shared import Sharing

#: Of the mean square of root keys: keeps the least squares of rare directions small.
_RIDGE = 1e-2


def repair(
    params: Params,
    plan: PodPlan,
    texts: Sequence[Any],
    *,
    length: int = 512,
    sinks: int = 8,
    recent: int = 56,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> PodPlan:
    """Fits the maps of a plan.

    Two models run side by side, layer by layer: the dense one, and the one under the plan with the
    maps found so far, whose hidden states carry the errors that are left of the layers below. A map
    starts where root keys, multiplied by its transpose, are nearest to the layer's own keys (least
    squares, before rotation), or at the identity if that is better, and is then refined by Adam, in
    one pass over the texts, on the relative squared error of each head's attention output.

    Args:
      params: the dense model.
      plan: from `jaxkv.pod.explore`, for this model.
      texts: strings or token ids of at least `length` tokens each; what is beyond is not used.
        Some fifty of 512 tokens do.
      length: tokens of each text.
      sinks, recent: near tokens while fitting: few, so that most are distant.
      learning_rate: of Adam at the start; falls to 0 along a cosine.
      seed: of the order of texts.

    Returns:
      The plan with its maps.

    Raises:
      ValueError: the plan is for another model, or there is no text, or one is too short.

    """
    plan.check(params.config)
    least = sinks + recent + 1
    check_length(length, least, params.config.max_positions)
    rows = np.array(cut(params, texts, length, at_least=length, why=f"length={length}"))
    sharing = Sharing(plan.root, sinks, recent)
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    fit = functools.partial(_fit, sharing=sharing, learning_rate=learning_rate)
    maps, errors = _run(params.weights(), rows, sharing, fit)
    settings = {
        **plan.settings,
        "repair": {
            "texts": len(rows),
            "tokens": rows.size,
            "length": length,
            "sinks": sinks,
            "recent": recent,
            "learning_rate": learning_rate,
            "error": errors,
        },
    }
    return dataclasses.replace(plan, maps=maps, settings=settings)


def _run(
    params: Params, rows: np.ndarray, sharing: Sharing, fit: Any
) -> tuple[np.ndarray, list[list[float]]]:
    """All maps `[layers, heads, dim, dim]`, and each layer's error before and after fitting."""
    config = params.config
    kv_heads, dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // kv_heads
    module = nnx.merge(structure(params.model, config)[0], params.state)
    texts = [Texts.of(jnp.array(row[None])) for row in rows]
    new = texts[0].as_new(config.rotary_embedding)
    windows = getattr(config, "windows", ()) or (None,) * config.num_layers
    # On the host, since all texts are in memory at once.
    dense: list[Any] = [np.asarray(module.embed(text.tokens, text.positions)) for text in texts]
    under = list(dense)
    roots: dict[int, np.ndarray] = {}
    maps = np.tile(np.eye(dim, dtype=np.float32), (config.num_layers, config.num_heads, 1, 1))
    errors = []
    for index in each(range(config.num_layers), "repairing"):
        block, window = module.layers[index], windows[index]
        layer = Whole(texts[0], sharing, sharing.root[index])
        followers = [k for k, root in enumerate(layer.roots) if root != index]
        seen = [_heads(block, x, new) for x in dense]
        wanted = [_attend(q, k, v, texts[0], new, window) for q, k, v in seen]
        met = [_heads(block, x, new) for x in under]
        roots[index] = np.stack([np.asarray(turned(k, new)) for _, k, _ in met])
        found = jnp.array(maps[index]).reshape(kv_heads, group, dim, dim)
        if followers:
            own = np.array(followers)
            lent = np.stack([roots[layer.roots[k]][:, :, :, k] for k in followers], 3)
            data = tuple(
                np.stack([np.asarray(x)[:, :, own] for x in arrays])
                for arrays in (*zip(*met, strict=True), wanted)
            )
            target_keys = np.stack([np.asarray(k)[:, :, own] for _, k, _ in seen])
            fitted, error = fit(data, lent, target_keys, texts[0], new, window=window)
            found = found.at[own].set(fitted)
            errors.append([index, *np.round(error, 4).tolist()])
            maps[index] = np.asarray(found).reshape(maps[index].shape)
        dense = [_onward(block, x, new, out) for x, out in zip(dense, wanted, strict=True)]
        for i, (x, heads) in enumerate(zip(under, met, strict=True)):
            far = None
            if followers:
                far = (jnp.array(lent[i]), found[own])
            out = _attend(*heads, texts[0], new, window, far, sharing, tuple(followers))
            under[i] = _onward(block, x, new, out)
        needed = {root for row in sharing.root[index + 1 :] for root in row}
        roots = {root: keys for root, keys in roots.items() if root in needed}
    return maps, errors


@dataclasses.dataclass(frozen=True)
class _Tap:
    """Stands in the place of a cache: notes what the layer computed, or gives what it shall see."""

    out: Any = None
    heads: Any = None

    def attend(self, queries: Array, keys: Array, values: Array, new: NewTokens, **_: Any) -> Any:
        del new
        out = jnp.zeros_like(queries) if self.out is None else self.out.reshape(queries.shape)
        return out, _Tap(heads=(queries, keys, values))


def _heads(block: nnx.Module, x: Array, new: NewTokens) -> tuple[Array, Array, Array]:
    """Queries `[batch, t, kv_heads, group, dim]`, keys and values of a layer, before rotation."""
    graphdef, state = nnx.split(block)
    return _tapped(graphdef, nnx.to_pure_dict(state), x, new, None)


def _onward(block: nnx.Module, x: Array, new: NewTokens, out: Array) -> np.ndarray:
    """The hidden state after a block whose attention gives `out`."""
    graphdef, state = nnx.split(block)
    return np.asarray(_tapped(graphdef, nnx.to_pure_dict(state), x, new, out))


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _tapped(
    graphdef: nnx.GraphDef, state: Mapping[str, Any], x: Array, new: NewTokens, out: Array | None
) -> Any:
    block = nnx.merge(graphdef, state)
    x, tap = block(x, _Tap(out), new, Full(), jnp.int32(0))
    if out is not None:
        return x
    queries, keys, values = tap.heads
    batch, t, kv_heads, dim = keys.shape
    return queries.reshape(batch, t, kv_heads, -1, dim), keys, values


@functools.partial(jax.jit, static_argnames=("window", "sharing", "followers"))
def _attend(
    queries: Array,
    keys: Array,
    values: Array,
    texts: Texts,
    new: NewTokens,
    window: int | None,
    far: tuple[Array, Array] | None = None,
    sharing: Sharing | None = None,
    followers: tuple[int, ...] = (),
) -> Float[Array, "batch t kv_heads group dim"]:
    """Attention of all heads; `far` are the keys that followers read, and their maps."""
    kv_heads, group, dim = queries.shape[2:]
    lent, far_map = (None, None) if far is None else far
    whole = Whole(texts, sharing, followers=followers, far_keys=lent)
    if far_map is not None:
        eye = jnp.broadcast_to(jnp.eye(dim, dtype=queries.dtype), (kv_heads, group, dim, dim))
        far_map = eye.at[jnp.array(followers)].set(far_map.astype(eye.dtype)).reshape(-1, dim, dim)
    flat = queries.reshape(*queries.shape[:2], -1, dim)
    out, _ = whole.attend(flat, keys, values, new, far_map=far_map, window=window)
    return out.reshape(queries.shape)


def _fit(
    data: Any,
    lent: np.ndarray,
    target_keys: np.ndarray,
    texts: Texts,
    new: NewTokens,
    *,
    sharing: Sharing,
    window: int | None,
    learning_rate: float,
) -> tuple[Array, np.ndarray]:
    """Maps of the heads that follow, and the relative error before and after (mean of the first
    and last quarter of the texts).
    """
    start = _nearest(target_keys, lent, new)
    group = data[0].shape[4]
    start = jnp.broadcast_to(start[:, None], (start.shape[0], group, *start.shape[1:]))
    return _descend(
        start, data, lent, texts, new, sharing=sharing, window=window, rate=learning_rate
    )


def _nearest(
    keys: Float[np.ndarray, "texts 1 t heads dim"],
    lent: Float[np.ndarray, "texts 1 t heads dim"],
    new: NewTokens,
) -> Float[Array, "heads dim dim"]:
    """Matrices M with `lent @ M.T` nearest to `keys`: then q . key is nearly (q M) . lent."""
    if new.turns is not None:
        # Both before rotation: there a token's place in the text plays no part.
        cos, sin = new.turns
        back = dataclasses.replace(new, turns=(cos, -sin))
        lent = np.stack([np.asarray(turned(jnp.asarray(x), back)) for x in lent])
    x, y = (
        np.moveaxis(a, 3, 0).reshape(a.shape[3], -1, a.shape[4]).astype(np.float32)
        for a in (lent, keys)
    )
    gram = np.einsum("hnd,hne->hde", x, x)
    dim = x.shape[-1]
    ridge = _RIDGE * np.trace(gram, axis1=1, axis2=2)[:, None, None] / dim * np.eye(dim)
    solved = np.linalg.solve(gram + ridge, np.einsum("hnd,hne->hde", x, y))
    return jnp.array(np.swapaxes(solved, 1, 2), jnp.float32)


@functools.partial(jax.jit, static_argnames=("sharing", "window", "rate"))
def _descend(start, data, lent, texts, new, *, sharing, window, rate):
    # A third of a second to import, and only those who fit need it.
    import optax

    count = lent.shape[0]
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, count))

    def error_of(maps, i):
        q, k, v, wanted = (x[i] for x in data)
        # Maps are float32, whatever the model's dtype, that small steps count.
        far = turned(map_queries(q, maps.astype(q.dtype)), new)
        out = attend_whole(
            turned(q, new),
            turned(k, new),
            v,
            texts,
            window,
            far=(far, lent[i]),
            sharing=sharing,
            remat=False,
        )
        out, wanted = out.astype(jnp.float32), wanted.astype(jnp.float32)
        apart = jnp.sum(jnp.square(out - wanted), (0, 1, 4))
        return apart / jnp.sum(jnp.square(wanted), (0, 1, 4))

    eye = jnp.broadcast_to(jnp.eye(start.shape[-1]), start.shape)
    few = range(min(2, count))
    plain, solved = (jnp.stack([error_of(m, i) for i in few]) for m in (eye, start))
    better = (jnp.mean(solved, 0) < jnp.mean(plain, 0))[..., None, None]
    maps = jnp.where(better, start, eye)

    def step(carry, i):
        maps, state = carry

        def loss(maps):
            errors = error_of(maps, i)
            return jnp.sum(errors), errors

        (_, errors), slope = jax.value_and_grad(loss, has_aux=True)(maps)
        updates, state = optimizer.update(slope, state)
        return (optax.apply_updates(maps, updates), state), jnp.mean(errors)

    (maps, _), errors = lax.scan(step, (maps, optimizer.init(maps)), jnp.arange(count))
    quarter = max(1, count // 4)
    parts = (plain, errors[:quarter], errors[-quarter:])
    return maps, jnp.stack([jnp.mean(part) for part in parts])
