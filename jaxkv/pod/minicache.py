"""`MiniCache`: pairs of layers store one direction per token for both (arXiv 2405.14366)."""

import dataclasses
from typing import ClassVar

import numpy as np

from jaxkv.pod.policy import Sharer
from jaxkv.shared import Merge, Sharing


@dataclasses.dataclass(frozen=True)
class MiniCache(Sharer):
    """Two layers store, for each token, one direction of their keys and one of their values, which
    lie between theirs (spherical interpolation), and the length of each; tokens whose directions
    lie far apart are stored whole (MiniCache, arXiv 2405.14366). Needs no training.

    A prompt is attended to as it is and merged afterwards, layer by layer; of what a decode step
    adds, and of what is whole, the nearest directions are merged next. [choice] Keys are merged as
    they are stored, rotated. A token is whole for keys and values alike, by the sum of their two
    angles, each KV head its own; the published rule is a threshold, here the number is given, so
    that memory is known beforehand.

    Attributes:
      plan: which layers share: `jaxkv.PodPlan.every(2, config, start=config.num_layers // 2)` for
        the published pairs, from the middle up.
      toward: how far the common direction is from the first layer's towards the second's, in
        [0, 1]; 0.6 in the paper.
      keep: the share of tokens that is stored whole, in [0, 1]; about 0.05 in the paper.
      of: which tokens are kept at all (by default all).

    Raises:
      ValueError: an argument is out of range, `plan` has blocks of more than two layers, or `of`
        cannot be shared.

    """

    toward: float = 0.6
    keep: float = 0.05

    name: ClassVar[str] = "minicache"
    keeps: ClassVar[str] = "every token; one direction for two layers, and their lengths"
    source: ClassVar[str] = "MiniCache, arXiv 2405.14366"
    frees: ClassVar[str] = "keys and values of the second layer of a pair, but for a few tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("toward", "keep"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1:
                raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")
        root = np.array(self.plan.root)
        longest = int((np.arange(len(root))[:, None] - root).max()) + 1
        if longest > 2:
            raise ValueError(
                f"MiniCache merges two layers, and the plan has a block of {longest}: take "
                "jaxkv.PodPlan.every(2, config)"
            )

    @property
    def sharing(self) -> Sharing:
        merge = Merge(self.toward, self.keep)
        return Sharing(self.plan.root, 0, 0, evicts=self.of.evicts, values=True, merge=merge)
