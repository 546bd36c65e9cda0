"""`CLA`: layers share keys and values outright (cross-layer attention, arXiv 2405.12981).

PoD's rival. A model must be trained for it. `averaged` makes a start of a dense one.
"""

import dataclasses
import re
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkv.models.base import flatten, map_with_path
from jaxkv.models.params import Params
from jaxkv.pod.plan import PodPlan
from jaxkv.pod.policy import Sharer
from jaxkv.shared import Sharing

#: Key and value projections, by the names of Llama and OPT.
_PROJECTIONS = re.compile(r"layers\.(\d+)\.(.*\.(?:k_proj|v_proj)\.(?:weight|bias))$")


@dataclasses.dataclass(frozen=True)
class CLA(Sharer):
    """Heads that follow a root read all of its keys and values, and store nothing.

    Attributes:
      plan: which layers share; `jaxkv.PodPlan.every(2, params.config)` for pairs of layers.
      of: which tokens are kept (by default all).

    Raises:
      ValueError: `plan` is no plan, or `of` cannot be shared.

    """

    name: ClassVar[str] = "cla"
    keeps: ClassVar[str] = "every token; keys and values once per block of layers"
    source: ClassVar[str] = "CLA, arXiv 2405.12981"
    frees: ClassVar[str] = "keys and values of layers that follow another"

    @property
    def sharing(self) -> Sharing:
        return Sharing(self.plan.root, 0, 0, evicts=self.of.evicts, values=True)


def averaged(params: Params, plan: PodPlan) -> Params:
    """A dense model as the start of a CLA one: a root's key and value projections become the mean
    over the layers that share them, head by head.

    Raises:
      ValueError: the plan is for another model, or projections are not apart (GPT-NeoX).

    """
    plan.check(params.config)
    heads, root = params.config.num_kv_heads, np.array(plan.root)
    found: dict[str, dict[int, Array]] = {}
    for path, leaf in flatten(params.state).items():
        match = _PROJECTIONS.search(path)
        if match:
            found.setdefault(match[2], {})[int(match[1])] = leaf
    if not found:
        raise ValueError(
            f"{params.model.__name__} has no k_proj and v_proj of its own in each layer, whose "
            "weights could be averaged"
        )

    def mean(path: str, leaf: Any) -> Any:
        match = _PROJECTIONS.search(path)
        if not match:
            return leaf
        layer, rows = int(match[1]), leaf.reshape(heads, -1, *leaf.shape[1:])
        for head in range(heads):
            sharing = np.flatnonzero(root[:, head] == layer)
            if len(sharing) > 1:
                same = [found[match[2]][int(other)].reshape(rows.shape)[head] for other in sharing]
                rows = rows.at[head].set(jnp.mean(jnp.stack(same), 0))
        return rows.reshape(leaf.shape)

    return dataclasses.replace(params, state=map_with_path(mean, params.state))
