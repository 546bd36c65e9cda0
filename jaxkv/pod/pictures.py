"""Pictures of a plan: how alike layers attend, and which of them share."""

import os
from typing import Any

from jaxkv.pod.plan import PodPlan


def draw(plan: PodPlan, path: str | os.PathLike[str]) -> None:
    """Writes a picture: for each KV head the similarity of all pairs of layers, the blocks that
    share outlined; and beneath, the plan as coloured blocks.

    Args:
      plan: from `jaxkv.pod.explore`.
      path: the suffix says the format (.png, .svg, .pdf).

    Raises:
      ValueError: the plan has no similarities, or matplotlib is not installed.

    """
    if plan.similarity is None:
        raise ValueError("the plan holds no similarities: it was not made by jaxkv.pod.explore")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'jaxkv[plots]'") from None

    heads, layers = plan.num_kv_heads, plan.num_layers
    columns = min(heads, 4)
    rows = -(-heads // columns)
    below = 0.6 + 0.25 * heads
    figure = Figure((3.2 * columns + 1.0, 3.2 * rows + below), layout="constrained")
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[3.2] * rows + [below])
    maps: list[Any] = []
    image: Any = None
    for head in range(heads):
        axes = figure.add_subplot(grid[head // columns, head % columns])
        table = plan.similarity[:, :, head]
        image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", origin="lower")
        for start, end in plan.blocks(head):
            size = end - start
            axes.add_patch(
                Rectangle((start - 0.5, start - 0.5), size, size, fill=False, ec="white", lw=1.2)
            )
        axes.set_title(f"KV head {head}", fontsize=9)
        axes.set_xlabel("layer", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.tick_params(labelsize=7)
        maps.append(axes)
    figure.colorbar(image, ax=maps, label="similarity", shrink=0.8)
    _draw_blocks(figure.add_subplot(grid[rows, :]), plan)
    shared = f"{plan.shared} of {layers * heads} heads read another layer's keys"
    name = f"{plan.model}: " if plan.model else ""
    figure.suptitle(f"{name}{shared}, {plan.saving:.1%} saved", fontsize=10)
    figure.savefig(path, dpi=120)


def _draw_blocks(axes: Any, plan: PodPlan) -> None:
    """One row per KV head; layers of one colour share the keys of the first of them."""
    from matplotlib import colormaps

    colours = [colormaps["tab20"](i) for i in range(20)]
    for head in range(plan.num_kv_heads):
        for number, (start, end) in enumerate(plan.blocks(head)):
            alone = end - start == 1
            axes.barh(
                head,
                end - start,
                left=start - 0.5,
                height=0.85,
                color="0.88" if alone else colours[number % len(colours)],
                edgecolor="white",
            )
    axes.set_xlim(-0.5, plan.num_layers - 0.5)
    axes.set_yticks(range(plan.num_kv_heads))
    axes.set_xlabel("layer (grey: keys of its own, for itself alone)", fontsize=8)
    axes.set_ylabel("KV head", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.invert_yaxis()
