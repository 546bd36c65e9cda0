"""Prompt in, text out: `generate` and `stream`.

Both run the same compiled loop some tokens at a time and differ only in what they do in between.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import loops
from jaxkv.compilation import CompileClock
from jaxkv.loops import CHUNK, Loop
from jaxkv.models.config import Config
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy, get_writer
from jaxkv.prefill import read
from jaxkv.progress import spinner
from jaxkv.prompts import to_rows
from jaxkv.report import Report, make_report
from jaxkv.room import plan
from jaxkv.sampling import row_keys, sampling
from jaxkv.text import GrowingText

#: `stream` hears from the compiled loop about this often, in seconds.
_STREAM_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
    """Where some sequences stand: what `generate` can go on after."""

    policy: Policy
    config: Config = dataclasses.field(repr=False)
    #: The cache, and for each sequence a token that it has not read yet.
    loop: Loop = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation(Past):
    """What `generate` returns. For one prompt `text` is a string and `tokens` a list of ids; for a
    batch both are lists of these, in the order of the prompts. Give it as `after=` to go on.
    """

    #: None for models without a tokenizer.
    text: Any
    #: The end-of-text token is included.
    tokens: Any
    #: Log-probability of each token under the model, if asked for; shaped as `tokens`.
    logprobs: Any
    report: Report

    def __str__(self) -> str:
        return self.text if isinstance(self.text, str) else "\n".join(map(str, self.text))


def generate(
    params: Params,
    prompt: Any,
    *,
    policy: str | Policy | None = None,
    budget: int | float | None = None,
    max_new_tokens: int = 128,
    ignore_eos: bool = False,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    logprobs: bool = False,
    prefill_chunk: int | None = None,
    after: Past | None = None,
) -> Generation:
    """Generates text with a compressed cache.

    Args:
      params: a model from `jaxkv.load`.
      prompt: a string, chat messages (`[{"role": "user", "content": ...}]`) or token ids; or a
        list of these, which is a batch. A batch gives what its rows would give alone.
      policy: which tokens the cache keeps: a name (`jaxkv policies` lists them) or a `Policy`;
        "full" if None.
      budget: tokens kept per KV head, an int, or a float for the fraction of each prompt's own
        length; None leaves the policy's own.
      max_new_tokens: at most so many; fewer when the model ends its text.
      ignore_eos: go on after the end-of-text token.
      temperature, top_k, top_p, min_p, repetition_penalty: see `jaxkv.sampling.sampling`;
        temperature 0 is greedy.
      seed: of the draws: an int for all rows alike, or one per prompt.
      stop: strings that end a row; the text is cut before them. They are looked for after every
        token, so the compiled loop returns each time; special tokens such as "<|im_end|>" cost
        nothing.
      logprobs: also return log-probabilities.
      prefill_chunk: read prompts in pieces of so many tokens and let the policy drop tokens after
        each: memory for the budget and one piece is then enough for a prompt of any length.
      after: go on after this generation, with its cache and its policy: the prompt is what
        follows. The earlier generation stays usable.

    Raises:
      ValueError: an argument is out of range, or the prompt does not fit the model.

    """
    options = {name: value for name, value in locals().items() if name not in _NOT_OPTIONS}
    run = _Run(params, prompt, _Options(**options))
    with spinner("generating"):
        list(run.chunks(lambda _: CHUNK))
    return run.result(with_logprobs=logprobs)


_NOT_OPTIONS = ("params", "prompt", "logprobs")


def stream(params: Params, prompt: Any, **options: Any) -> Generator[str, None, Generation]:
    """Generates text and yields it piece by piece, as soon as it is certain.

    Takes one prompt, and the arguments of `generate` except `logprobs`. The pieces together are
    the text that `generate` gives; the iterator returns the `Generation` when it ends.

    Raises:
      ValueError: as `generate`, at once; also for a batch of prompts.

    """
    unknown = options.keys() - {field.name for field in dataclasses.fields(_Options)}
    if unknown:
        raise TypeError(f"stream() got an unexpected keyword argument {min(unknown)!r}")
    run = _Run(params, prompt, _Options(**options))
    if not run.single:
        raise ValueError(f"stream takes one prompt, got {len(run.rows)}; use generate")
    if params.tokenizer is None:
        raise ValueError(f"{params.name or 'the model'} has no tokenizer: use generate")
    return _pieces(run)


def _pieces(run: "_Run") -> Generator[str, None, Generation]:
    told = ""
    chunks = run.chunks(lambda seconds: max(1, round(_STREAM_SECONDS / seconds)))
    with spinner("compiling and reading the prompt"):
        next(chunks)
    for _ in itertools.chain([None], chunks):
        certain = run.texts[0].certain()
        if len(certain) > len(told):
            yield certain[len(told) :]
            told = certain
    result = run.result()
    if len(result.text) > len(told):
        yield result.text[len(told) :]
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """The arguments of `generate` and `stream`, checked."""

    policy: str | Policy | None = None
    budget: int | float | None = None
    max_new_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | Sequence[int] = 0
    stop: str | Sequence[str] = ()
    prefill_chunk: int | None = None
    after: Past | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.max_new_tokens, int | np.integer)
        if not whole or isinstance(self.max_new_tokens, bool) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be an int >= 1, got {self.max_new_tokens!r}")
        several = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        stops = tuple(self.stop) if several else () if self.stop is None else (self.stop,)
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(f"stop must be a non-empty string or several, got {self.stop!r}")
        object.__setattr__(self, "stop", stops)

    def resolved_policy(self) -> Policy:
        """The policy with its budget; that of `after` if there is one."""
        if self.after is None:
            return get_writer("full" if self.policy is None else self.policy, self.budget)
        if not isinstance(self.after, Past):
            raise ValueError(f"after must be a jaxkv.Generation, got {self.after!r}")
        same = (None, self.after.policy, self.after.policy.name)
        if self.budget not in (None, self.after.policy.budget) or self.policy not in same:
            raise ValueError(
                f"the cache of `after` was made under {self.after.policy!r}, and policy and "
                f"budget cannot change, got policy={self.policy!r}, budget={self.budget!r}"
            )
        return self.after.policy


class _Run:
    """One call of `generate` or `stream`: checks everything first, then runs."""

    def __init__(self, params: Params, prompt: Any, options: _Options):
        self.params, self.options, self.after = params, options, options.after
        self.policy = options.resolved_policy()
        self.rows, self.single = to_rows(params, prompt)
        count = len(self.rows)
        self.prompt_tokens = [len(row) for row in self.rows]
        self.sampling = sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
        )
        self.keys = row_keys(options.seed, count)
        if options.stop and params.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none")
        # A stop string that is a special token never shows in the text: it ends a row by its id.
        special = {s: params.tokenizer.special_id(s) for s in options.stop if params.tokenizer}
        self.stops = [stop for stop in options.stop if special[stop] is None]
        self.texts = [GrowingText(params.tokenizer, self.stops) for _ in self.rows]
        self.tokens: list[list[int]] = [[] for _ in self.rows]
        self.logprobs: list[list[float]] = [[] for _ in self.rows]
        self.seen = [0] * count
        if self.after is not None:
            self._check_after(self.after)
            # The last token was chosen but not fed; it comes first now.
            pending = np.asarray(self.after.loop.token).tolist()
            self.rows = [[first, *row] for first, row in zip(pending, self.rows, strict=True)]
            self.seen = np.asarray(self.after.loop.cache.length).tolist()
        self.plan = plan(
            params,
            self.policy,
            self.prompt_tokens,
            # The last new token is not read.
            new=max(map(len, self.rows)) + options.max_new_tokens - 1,
            grow=options.max_new_tokens - 1,
            seen=self.seen,
            chunk=options.prefill_chunk,
            before=None if self.after is None else self.after.loop.cache,
        )
        self.weights = self.plan.weights
        eos = () if options.ignore_eos else params.config.eos_ids
        eos += tuple(token for token in special.values() if token is not None)
        self.eos = jnp.array(eos or (-1,), jnp.int32)
        self.seconds = {"compile": 0.0, "prefill": 0.0, "decode": 0.0}

    def _check_after(self, after: Past) -> None:
        if after.config != self.params.config:
            raise ValueError("`after` was generated by another model: its cache does not fit")
        if self.sampling.repetition_penalty is not None and after.loop.used is None:
            raise ValueError(
                "repetition_penalty must be given from the first generation on: the tokens of "
                "`after` were not recorded"
            )
        if after.loop.token.shape[0] != len(self.rows):
            raise ValueError(
                f"`after` holds {after.loop.token.shape[0]} sequences, got {len(self.rows)} prompts"
            )

    def chunks(self, chunk_size: Callable[[float], int]) -> Iterator[None]:
        """Runs; yields whenever there are new tokens. `chunk_size` is told the seconds that a
        token takes and says how many tokens to decode before the next yield.
        """
        with self._timed("prefill"):
            loop, first = self._read_prompt()
            token, logprob = np.asarray(loop.token)[:, None], np.asarray(first)[:, None]
        self.loop = self._take(loop, token, logprob)
        yield
        left = self.options.max_new_tokens - 1
        per_token = _STREAM_SECONDS
        while left > 0 and not np.asarray(self.loop.done).all():
            # A stop string must end its row before the next token enters the cache.
            steps = 1 if self.stops else min(left, CHUNK, chunk_size(per_token))
            with self._timed("decode"):
                start, clock = time.perf_counter(), CompileClock()
                loop, chosen, logprobs = loops.decode(
                    self.weights,
                    self.loop,
                    self.sampling,
                    self.eos,
                    jnp.int32(steps),
                    self.plan.policy,
                )
                tokens = np.asarray(chosen)
                per_token = (time.perf_counter() - start - clock.seconds) / steps
                per_token = max(per_token, 1e-6)
            self.loop = self._take(loop, tokens[:, :steps], np.asarray(logprobs))
            left -= steps
            yield

    def _read_prompt(self) -> tuple[Loop, jax.Array]:
        before = None if self.after is None else self.after.loop.cache
        logits, cache = read(self.params, self.plan, self.rows, before)
        return loops.first_token(logits, cache, self.keys, self._used(), self.sampling, self.eos)

    def _used(self) -> jax.Array | None:
        if self.sampling.repetition_penalty is None:
            return None
        used = np.zeros((len(self.rows), self.params.config.vocab_size), bool)
        for i, row in enumerate(self.rows):
            used[i, row] = True
        if self.after is not None and self.after.loop.used is not None:
            used |= np.asarray(self.after.loop.used)
        return jnp.asarray(used)

    def _take(self, loop: Loop, tokens: np.ndarray, logprobs: np.ndarray) -> Loop:
        """Adds new tokens to the rows and ends rows whose stop string is complete."""
        done = np.asarray(loop.done).copy()
        for i, row in enumerate(tokens):
            for token, logprob in zip(row.tolist(), logprobs[i].tolist(), strict=False):
                if token < 0:
                    break
                self.tokens[i].append(token)
                self.logprobs[i].append(logprob)
                done[i] |= self.texts[i].add(token)
        if self.stops:
            loop = dataclasses.replace(loop, done=jnp.asarray(done))
        return loop

    def _timed(self, name: str) -> "_Timer":
        return _Timer(self.seconds, name)

    def result(self, *, with_logprobs: bool = False) -> Generation:
        """What was generated, and the report."""
        report = make_report(
            self.params,
            self.policy,
            self.loop.cache,
            prompt_tokens=self.prompt_tokens,
            new_tokens=[len(row) for row in self.tokens],
            budgets=[round(float(b)) for b in self.plan.budgets.mean((0, 2))],
            first_turn=self.after is None,
            seconds=self.seconds,
        )
        texts = [text.final() for text in self.texts]
        pick: Callable[[list], Any] = (lambda rows: rows[0]) if self.single else (lambda rows: rows)
        return Generation(
            text=pick(texts),
            tokens=pick(self.tokens),
            logprobs=pick(self.logprobs) if with_logprobs else None,
            report=report,
            policy=self.policy,
            config=self.params.config,
            loop=self.loop,
        )


class _Timer:
    """Adds the time inside to `seconds[name]`, and what was compiling to `seconds["compile"]`."""

    def __init__(self, seconds: dict[str, float], name: str):
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start, self.clock = time.perf_counter(), CompileClock()

    def __exit__(self, *_: object) -> None:
        compiling = self.clock.seconds
        self.seconds["compile"] += compiling
        self.seconds[self.name] += max(0.0, time.perf_counter() - self.start - compiling)
