"""Text that grows token by token, and the strings that end it."""

from collections.abc import Sequence

from jaxkv.tokenizer import Tokenizer


class GrowingText:
    """The text of one row as it grows, and whether a stop string has ended it."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]):
        self.tokenizer, self.stops = tokenizer, stops
        self.decode = tokenizer.decoder() if tokenizer else None
        self.tokens: list[int] = []
        self.text = ""
        self.end: int | None = None

    def add(self, token: int) -> bool:
        """Takes the next token; True when a stop string is complete."""
        self.tokens.append(token)
        if self.decode is None:
            return False
        self.text += self.decode(token)
        found = [at for at in (self.text.find(stop) for stop in self.stops) if at >= 0]
        self.end = min(found, default=None)
        return self.end is not None

    def certain(self) -> str:
        """The text so far, less an end that may become a stop string."""
        if self.end is not None:
            return self.text[: self.end]
        for size in range(max(map(len, self.stops), default=0), 0, -1):
            if any(self.text.endswith(stop[:size]) for stop in self.stops if size <= len(stop)):
                return self.text[:-size]
        return self.text

    def final(self) -> str | None:
        """The whole text, cut before the stop string."""
        if self.tokenizer is None:
            return None
        if self.end is not None:
            return self.text[: self.end]
        return self.tokenizer.decode(self.tokens)
