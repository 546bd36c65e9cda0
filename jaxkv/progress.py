"""Signs of life on anything that takes more than two seconds, on standard error, on terminals."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")

_SECONDS_BEFORE = 2.0


@contextlib.contextmanager
def spinner(message: str) -> Iterator[None]:
    """Shows `message` and the time passed, once the work inside has taken two seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    status = console.status(message)
    timer = threading.Timer(_SECONDS_BEFORE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may just have fired
        status.stop()


def each(items: Iterable[Item], message: str, *, total: int | None = None) -> Iterator[Item]:
    """The items, with a bar that shows how many have been handled."""
    console = Console(stderr=True)
    yield from track(
        items,
        message,
        total=total,
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
