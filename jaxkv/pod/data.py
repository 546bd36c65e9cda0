"""Texts for training: documents packed into rows, every range of their lengths alike often."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxkv.models.params import Params
from jaxkv.prompts import to_rows

#: A packed row, by the names of `jaxkv.pod.whole.Texts`.
Row = dict[str, np.ndarray]


def pack(documents: Sequence[Sequence[int]], length: int) -> list[Row]:
    """Rows of `length` tokens that hold whole documents, one after the other.

    A document that is longer is cut; one that does not fit the row begins the next, and what is
    left of a row is padding (document -1, position -1).
    """
    rows: list[Row] = []
    used, number = length, 0
    for document in documents:
        for start in range(0, len(document), length):
            piece = document[start : start + length]
            if used + len(piece) > length:
                rows.append(
                    {
                        "tokens": np.zeros(length, np.int32),
                        "positions": np.full(length, -1, np.int32),
                        "documents": np.full(length, -1, np.int32),
                    }
                )
                used, number = 0, 0
            at = slice(used, used + len(piece))
            rows[-1]["tokens"][at] = piece
            rows[-1]["positions"][at] = np.arange(len(piece))
            rows[-1]["documents"][at] = number
            used, number = used + len(piece), number + 1
    return rows


def ranges(
    documents: Sequence[Sequence[int]], length: int, shortest: int
) -> list[list[Sequence[int]]]:
    """Documents by length: up to `shortest` tokens, up to twice as many, and so on up to `length`.
    Longer ones are cut. Ranges without documents are left out.
    """
    bounds = [shortest]
    while bounds[-1] < length:
        bounds.append(min(2 * bounds[-1], length))
    found: list[list[Sequence[int]]] = [[] for _ in bounds]
    for document in documents:
        for start in range(0, len(document), length):
            piece = document[start : start + length]
            if len(piece) > 1:  # one token predicts nothing
                found[next(i for i, bound in enumerate(bounds) if len(piece) <= bound)].append(
                    piece
                )
    return [pieces for pieces in found if pieces]


class Batches(Iterator[Row]):
    """Batches without end, in an order that follows from a seed and can be returned to.

    Args:
      params: whose tokenizer is used.
      texts: documents: strings or token ids.
      length: tokens of a row.
      batch: rows of a batch; every range of document lengths gives as many of them, on average.
      shortest: upper end of the shortest range.
      seed: of the order.

    Raises:
      ValueError: there is no text of at least two tokens.

    """

    def __init__(
        self,
        params: Params,
        texts: Sequence[Any],
        *,
        length: int,
        batch: int,
        shortest: int | None = None,
        seed: int = 0,
    ):
        # It and what it needs take a second to import, and only those who train need it.
        import grain

        if isinstance(texts, str) or not len(texts):
            raise ValueError(f"texts must be a list of at least one text, got {texts!r:.80}")
        documents, _ = to_rows(params, list(texts))
        parts = ranges(documents, length, shortest or max(2, length // 4))
        if not parts:
            raise ValueError("there is nothing to train on: no text has two tokens or more")
        rng = np.random.default_rng(seed)
        sources = []
        for number, part in enumerate(parts):
            rows = pack([part[i] for i in rng.permutation(len(part))], length)
            sources.append(grain.MapDataset.source(rows).shuffle(seed=seed + number).repeat())
        mixed = grain.MapDataset.mix(sources) if len(sources) > 1 else sources[0]
        #: Tokens of all documents.
        self.tokens = sum(len(piece) for part in parts for piece in part)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        self._rows = iter(mixed.batch(batch, drop_remainder=True).to_iter_dataset(options))

    def __next__(self) -> Row:
        return next(self._rows)

    @property
    def state(self) -> dict[str, Any]:
        """Where it stands, as JSON."""
        return self._rows.get_state()

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._rows.set_state(state)
