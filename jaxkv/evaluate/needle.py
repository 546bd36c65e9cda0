"""Needle in a haystack for small models: what does a compressed cache still know of a sentence?"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from jaxkv import loops
from jaxkv.buckets import pad_rows, prompt_bucket
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy, get
from jaxkv.prefill import read
from jaxkv.prompts import to_rows
from jaxkv.room import plan

#: What is hidden: said twice, since a small model may miss what is said once even with all of its
#: cache. The question is what stands before the first answer.
SENTENCE = "\n\nThe secret word of {place}: {word}. The secret word of {place}: {word}.\n\n"
#: Tokens of the text that stand before any needle: the very first tokens are kept by many policies
#: whatever they are, and small models remember other tokens badly there.
BEGINNING = 16
PLACES = (
    *("Lisbon", "Berlin", "Tokyo", "Chicago", "Madrid", "Vienna", "Dublin", "Cairo"),
    *("Paris", "Boston", "Moscow", "Rome", "Sydney", "Delhi", "Toronto", "Athens"),
)
WORDS = (
    *("orange", "hammer", "piano", "castle", "rocket", "butter", "candle", "dragon"),
    *("forest", "garden", "helmet", "island", "jacket", "kitten", "lemon", "mirror"),
)


@dataclasses.dataclass(frozen=True)
class Needle:
    """A hidden sentence and a question about it, as token ids: sentence = (line breaks), question,
    answer, full stop.
    """

    sentence: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class NeedleGrid:
    """What was found. Tables are `[length][depth]`, means over the needles."""

    policy: Policy
    #: Whether the question was read together with the context.
    aware: bool
    #: Tokens of context, question and answer together.
    lengths: tuple[int, ...]
    #: Where the needle stands: 0 is the beginning of the context, 1 its end.
    depths: tuple[float, ...]
    #: Share of needles whose answer greedy decoding gives, token for token.
    found: tuple[tuple[float, ...], ...]
    #: Log-probability of the answer, mean over its tokens.
    logprobs: tuple[tuple[float, ...], ...]
    #: For each length, tokens stored per KV head when the context has been read, on average.
    kept: tuple[float, ...]

    @property
    def score(self) -> float:
        """Share of all needles found."""
        return float(np.mean(self.found))

    @property
    def logprob(self) -> float:
        """Mean log-probability of a token of an answer."""
        return float(np.mean(self.logprobs))


def needle_grid(
    params: Params,
    haystack: Any,
    *,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    lengths: Sequence[int] = (512, 1024, 2048),
    depths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    needles: int = 2,
    seed: int = 0,
    aware: bool = False,
) -> NeedleGrid:
    """Hides "The secret word of Lisbon: orange." (twice in a row) in a text, reads the text with a
    compressed cache, goes on with "The secret word of Lisbon:", and looks at what the model
    expects.

    Two protocols:

    - query-agnostic (the default): the context is read and compressed before the question is seen.
      This is what a document that is asked about later needs, and hard.
    - query-aware (`aware=True`): the question (all but its last token) is the end of the prompt, so
      that what it attends to can be kept. SnapKV and its relatives are usually measured so.

    The budget is the same for all policies: tokens per KV head, a fraction being of the context
    without the question. What is not part of the prompt is fed one token at a time, as while
    decoding: a policy that drops at every token stays at its budget, one that drops at prompts only
    lets the cache grow by these few tokens, and one that selects what a step reads selects here
    too. (A second turn of `jaxkv.generate` reads the question as a block instead, after which
    policies for prompts cut to the budget again: a few tokens of the context more are lost.)

    One context holds one needle; a needle has the same haystack around it at all depths, and its
    depths are one batch.

    Args:
      params: a model with a tokenizer.
      haystack: real text, or token ids, of at least the longest length.
      policy, budget: as for `jaxkv.generate`.
      lengths: tokens of context, question and answer together.
      depths: where in the context the needle stands, from 0 (after its first 16 tokens) to 1 (at
        its end).
      needles: how many are tried at each length and depth, at most 16.
      seed: of places, words and parts of the haystack.
      aware: see above.

    Raises:
      ValueError: an argument is out of range, the haystack is too short, the model has no
        tokenizer, or the policy can score given texts only.

    """
    chosen = get(policy, budget)
    if chosen.simulates:
        raise ValueError(f"{chosen!r} scores given texts only: no question can follow a context")
    lengths, depths = tuple(lengths), tuple(map(float, depths))
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths must be numbers in [0, 1], got {depths!r}")
    hidden = make_needles(params, needles, seed)
    room = max(len(n.question) for n in hidden) + max(len(n.answer) for n in hidden)
    least = room + BEGINNING + 2 * max(len(n.sentence) for n in hidden)
    if not lengths or not all(type(n) is int and n >= least for n in lengths):
        raise ValueError(f"lengths must be ints >= {least}, got {lengths!r}")
    straw, first = _tokens(params, haystack)
    if len(straw) < max(lengths):
        raise ValueError(
            f"the haystack has {len(straw)} tokens, and the longest context takes {max(lengths)}: "
            "give a longer text"
        )
    rng = np.random.default_rng(seed)
    # Contexts of all lengths begin at the same places of the text.
    offsets = rng.integers(0, len(straw) - max(lengths) + 1, needles)
    console = Console(stderr=True)
    tries = track(
        [(length, number) for length in lengths for number in range(needles)],
        "needles",
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    found = []
    for length, number in tries:
        hay = straw[offsets[number] :]
        contexts = [
            first + hide(hidden[number], hay, length - room - len(first), d) for d in depths
        ]
        found.append(_ask(params, chosen, contexts, hidden[number], aware))
    # [length][needle][what][depth] -> [what][length][depth]
    shape = (len(lengths), needles, 3, len(depths))
    hits, logprobs, kept = np.moveaxis(np.reshape(found, shape).mean(1), 1, 0)
    return NeedleGrid(
        policy=chosen,
        aware=aware,
        lengths=lengths,
        depths=depths,
        found=tuple(map(tuple, hits.tolist())),
        logprobs=tuple(map(tuple, logprobs.tolist())),
        kept=tuple(kept.mean(1).tolist()),
    )


def make_needles(params: Params, count: int, seed: int = 0) -> list[Needle]:
    """Needles with different places and words.

    Raises:
      ValueError: there are not so many, or the model has no tokenizer.

    """
    if type(count) is not int or not 1 <= count <= len(PLACES):
        raise ValueError(f"needles must be an int from 1 to {len(PLACES)}, got {count!r}")
    if params.tokenizer is None:
        raise ValueError(f"{params.name or 'the model'} has no tokenizer to write needles with")
    rng = np.random.default_rng(seed)
    places, words = rng.permutation(PLACES)[:count], rng.permutation(WORDS)[:count]
    made = []
    for place, word in zip(places, words, strict=True):
        before, after = SENTENCE.format(place=place, word=word).split(f" {word}", 1)
        question, answer, end = (
            params.tokenizer.encode(part, add_special_tokens=False)
            for part in (before, f" {word}", after)
        )
        made.append(Needle((*question, *answer, *end), tuple(question), tuple(answer)))
    return made


def hide(needle: Needle, haystack: Sequence[int], length: int, depth: float) -> list[int]:
    """The first `length` tokens of the haystack with the needle put in, whole, at `depth`: 0 is
    after `BEGINNING` tokens, 1 the end.
    """
    straw = list(haystack[: length - len(needle.sentence)])
    at = BEGINNING + round(depth * (len(straw) - BEGINNING))
    return [*straw[:at], *needle.sentence, *straw[at:]]


def _tokens(params: Params, haystack: Any) -> tuple[list[int], list[int]]:
    """The haystack's tokens, and those that the model wants before any text."""
    assert params.tokenizer is not None
    first = params.tokenizer.encode("")
    if isinstance(haystack, str):
        return params.tokenizer.encode(haystack, add_special_tokens=False), first
    rows, single = to_rows(params, haystack)
    if not single:
        raise ValueError(f"haystack must be one text, got {len(rows)}")
    return rows[0], first


def _ask(
    params: Params, policy: Policy, contexts: list[list[int]], needle: Needle, aware: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads contexts of equal length, then the question. For each context: whether the answer is
    found, the mean log-probability of its tokens, and tokens kept per KV head.
    """
    *question, last = needle.question
    answer = needle.answer
    batch = len(contexts)
    prompts = [context + question for context in contexts] if aware else contexts
    grow = len(answer) + (0 if aware else len(question))
    planned = plan(
        params, policy, [len(contexts[0])] * batch, new=len(prompts[0]) + grow, grow=grow
    )
    _, cache = read(params, planned, prompts)
    kept = np.mean([np.asarray(layer.stored()).mean(1) for layer in cache.layers], 0)
    width = prompt_bucket(max(len(question), len(answer)))

    def feed(cache: Any, tokens: Sequence[int], targets: Sequence[int]) -> Any:
        rows, added = pad_rows([tokens] * batch, width)
        wanted = jnp.broadcast_to(pad_rows([targets], width)[0], rows.shape)
        return loops.score_tokens(
            planned.weights, cache, rows, wanted, added, planned.policy, at_once=False
        )

    if not aware:
        cache, _, _ = feed(cache, question, [*question[1:], last])
    _, logprob, hits = feed(cache, [last, *answer[:-1]], answer)
    found = (np.asarray(hits) == len(answer)).astype(float)
    return found, np.asarray(logprob) / len(answer), kept
