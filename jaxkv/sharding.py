"""Where arrays lie: layouts in a device's memory."""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout


def format_of(
    axes: tuple[str | None, ...], sharding: jax.sharding.Sharding
) -> Format | jax.sharding.Sharding:
    """How an array with these logical axes is laid out on its devices.

    A vocabulary is read by rows. TPU would store a table whose rows are not whole lanes by columns,
    which wastes less room, and every call of a compiled loop would make a copy of it by rows.
    """
    device: Any = next(iter(sharding.device_set))
    if device.platform == "tpu" and axes[0] == "vocab":
        return Format(Layout(tuple(range(len(axes)))), sharding)
    return sharding
