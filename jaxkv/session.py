"""`Session`: several turns on one compressed cache, branches of it, and sessions on disk."""

import dataclasses
import os
from collections.abc import Generator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import checkpoint, loops
from jaxkv.generate import Generation, Past, generate, stream
from jaxkv.loops import Loop
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy, get_writer
from jaxkv.policies.serial import from_json, to_json
from jaxkv.prefill import read
from jaxkv.prompts import to_rows
from jaxkv.room import plan
from jaxkv.sampling import row_keys

_FORMAT = 1


class Session:
    """A conversation, or a document and questions about it, on one compressed cache.

    What has been read is immutable: `past` is where the session stands, and may be kept to `rewind`
    to, or to branch from. Reading and generating replace it.

    Args:
      params: a model from `jaxkv.load`.
      policy, budget: as for `jaxkv.generate`; a fractional budget is of the first text.
      prefill_chunk: texts are read in pieces of so many tokens, see `jaxkv.generate`.

    Raises:
      ValueError: as `jaxkv.generate`.

    """

    def __init__(
        self,
        params: Params,
        *,
        policy: str | Policy = "full",
        budget: int | float | None = None,
        prefill_chunk: int | None = None,
    ):
        self.params = params
        self.policy = get_writer(policy, budget)
        self.prefill_chunk = prefill_chunk
        #: Where the session stands; None before anything was read.
        self.past: Past | None = None

    @property
    def tokens_seen(self) -> int:
        """Tokens read or generated so far, the last one included, which the cache has not seen."""
        return 0 if self.past is None else int(self.past.loop.cache.length[0]) + 1

    @property
    def tokens_kept(self) -> int:
        """Tokens that the cache holds, of the KV head that holds most."""
        if self.past is None:
            return 0
        return max(int(np.max(layer.stored())) for layer in self.past.loop.cache.layers)

    def read(self, text: Any) -> Self:
        """Reads a text (a string, chat messages or token ids) and generates nothing.

        The policy chooses from it now, before anything that follows is known.
        """
        (ids,), single = to_rows(self.params, text)
        if not single:
            raise ValueError("a session reads one text at a time")
        seen, before = 0, None
        if self.past is not None:
            before = self.past.loop.cache
            seen, ids = int(before.length[0]), [int(self.past.loop.token[0]), *ids]
        # The last token waits for what follows, as after a generation.
        row = ids[:-1]
        planned = plan(
            self.params,
            self.policy,
            [len(ids)],
            new=len(ids),
            grow=0,
            seen=[seen],
            chunk=self.prefill_chunk,
            before=before,
        )
        if row:
            _, cache = read(self.params, planned, [row], before)
        else:
            budgets = jnp.array(planned.budgets)
            cache = loops.empty_cache(self.params, planned.policy, budgets, planned.slots)
        token, done = jnp.array(ids[-1:], jnp.int32), jnp.zeros(1, bool)
        loop = Loop(cache, token, done, row_keys(0, 1), None)
        self.past = Past(policy=self.policy, config=self.params.config, loop=loop)
        return self

    def generate(self, prompt: Any, **options: Any) -> Generation:
        """Reads a prompt and generates; takes the options of `jaxkv.generate`."""
        out = generate(self.params, prompt, **self._options(options))
        self.past = out
        return out

    def stream(self, prompt: Any, **options: Any) -> Generator[str, None, Generation]:
        """The same piece by piece; the session goes on when the iterator has ended."""
        pieces = stream(self.params, prompt, **self._options(options))

        def run() -> Generator[str, None, Generation]:
            out = yield from pieces
            self.past = out
            return out

        return run()

    def ask(self, questions: Sequence[Any], **options: Any) -> Generation:
        """Generates after each of several prompts, as a batch; the session stays where it is."""
        if self.past is None:
            raise ValueError("nothing has been read: use read(text) before ask(questions)")
        rows, single = to_rows(self.params, questions)
        if single:
            raise ValueError("ask takes a list of prompts; for one, fork() and generate()")
        loop = jax.tree.map(lambda x: jnp.repeat(x, len(rows), 0), self.past.loop)
        branch = Past(policy=self.policy, config=self.params.config, loop=loop)
        return generate(self.params, rows, **{**self._options(options), "after": branch})

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        fixed = {"policy", "budget", "after"} & options.keys()
        if fixed:
            raise TypeError(f"{min(fixed)} belongs to the session, not to a call")
        where = {"policy": self.policy} if self.past is None else {"after": self.past}
        return {"prefill_chunk": self.prefill_chunk, **options, **where}

    def fork(self) -> "Session":
        """A session that stands at the same place and goes its own way; costs no memory."""
        other = Session(self.params, policy=self.policy, prefill_chunk=self.prefill_chunk)
        other.past = self.past
        return other

    def rewind(self, past: Past | None) -> None:
        """Goes back to where the session stood: an earlier value of `past`."""
        if past is not None and (past.policy, past.config) != (self.policy, self.params.config):
            raise ValueError(
                f"that is a place in a session under {past.policy!r}, this one has {self.policy!r}"
                if past.policy != self.policy
                else "that is a place in a session of another model"
            )
        self.past = past

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the session to a folder (with Orbax), which must not exist.

        Raises:
          ValueError: nothing has been read yet, the folder exists, or the policy holds something
            that cannot be written.

        """
        if self.past is None:
            raise ValueError("there is nothing to save: the session has read nothing")
        loop = self.past.loop
        state = dataclasses.replace(loop, keys=jax.random.key_data(loop.keys))
        about = {
            "format": _FORMAT,
            "kind": "session",
            "model": {"name": self.params.name, "config": repr(self.params.config)},
            "dtype": str(self.params.dtype),
            "policy": to_json(self.policy),
            "prefill_chunk": self.prefill_chunk,
        }
        checkpoint.save(path, state, about)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], params: Params, *, policy: Policy | None = None
    ) -> "Session":
        """Reads a session from a folder; it goes on to the bit where it was.

        Args:
          path: the folder.
          params: the model that the session was made with.
          policy: only needed for policies that `save` cannot describe in full, such as those with
            a fitted surrogate; otherwise it must be the session's own.

        Raises:
          ValueError: there is no session, or it is of another model, dtype or policy.

        """
        about = checkpoint.read_about(path, "session", _FORMAT)
        if about["model"]["config"] != repr(params.config):
            raise ValueError(
                f"{os.fspath(path)} holds a session of {about['model']['name'] or 'a model'} with "
                f"{about['model']['config']}; the model given is {params.name or 'one'} with "
                f"{params.config!r}"
            )
        if about["dtype"] != str(params.dtype):
            raise ValueError(
                f"{os.fspath(path)} holds a session in {about['dtype']}, the model given is in "
                f"{params.dtype}: load it with dtype={about['dtype']!r}"
            )
        chosen = policy if policy is not None else from_json(about["policy"])
        if to_json(chosen) != about["policy"]:
            raise ValueError(
                f"{os.fspath(path)} holds a session under {about['policy']}, got {to_json(chosen)}"
            )
        session = cls(params, policy=chosen, prefill_chunk=about["prefill_chunk"])
        state = checkpoint.load(path)
        keys = jax.random.wrap_key_data(state["keys"])
        cache = checkpoint.cache_of(state["cache"], chosen.sharing)
        loop = Loop(cache, state["token"], state["done"], keys, state.get("used"))
        session.past = Past(policy=chosen, config=params.config, loop=loop)
        return session
