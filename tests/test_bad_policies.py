"""Policies that cannot be, alone, together, or with a model: refused in one line."""

import pytest

import jaxkv
from jaxkv import (
    H2O,
    RKV,
    AdaKV,
    Best,
    ChunkKV,
    Compose,
    CriticalKV,
    DuoAttention,
    ExpectedAttention,
    Fixed,
    Full,
    KVzap,
    KVzip,
    LMInfinite,
    Quest,
    SnapKV,
    Streaming,
    Strided,
    TopK,
    plus_heavy,
)

pytestmark = pytest.mark.usefixtures("annotations_unchecked")


def refused(match, call):
    with pytest.raises(ValueError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        # Budgets below what a rule needs.
        (lambda: Fixed(8, block=9), r"budget of 8 is below .*fixed needs: at least 9"),
        (lambda: Fixed(8, block=4, summary=5), r"summary=5 exceeds the block of 4"),
        (lambda: SnapKV(32), r"budget of 32 is below .*snapkv needs: at least 33"),
        (lambda: Quest(8), r"budget of 8 is below .*quest needs: at least 16"),
        (lambda: LMInfinite(10), r"budget of 10 is below .*at least 11"),
        (lambda: ExpectedAttention(4), r"budget of 4 is below .*at least 5"),
        (lambda: RKV(8), r"budget of 8 is below .*at least 9"),
        (lambda: AdaKV(SnapKV(), budget=5), r"budget of 5 is below .*snapkv needs: at least 33"),
        (
            lambda: plus_heavy(Streaming(6), heavy=0.5).budgets(0, 2, 2),
            r"of a budget of 6 tokens heavy=0.5 leaves 3 to streaming, which needs at least 5",
        ),
        # Arguments out of range.
        (lambda: Strided(8, stride=0), r"stride must be an int >= 1 or None, got 0"),
        (lambda: SnapKV(64, kernel=4), r"kernel must be an odd int >= 1, got 4"),
        (lambda: SnapKV(64, window=0), r"window must be an int >= 1, got 0"),
        (lambda: SnapKV(64, pooling="sum"), r"pooling must be 'avg' or 'max', got 'sum'"),
        (lambda: H2O(8, mode="drop"), r"mode must be one of .*real_drop.*, got 'drop'"),
        (lambda: H2O(8, group="median"), r"group must be one of sum, mean, max, got 'median'"),
        (lambda: KVzip(0.5, level="layer"), r"uniform, heads, all, got 'layer'"),
        (lambda: plus_heavy(Strided(8), heavy=1), r"heavy must be a share in \(0, 1\), got 1"),
        (lambda: AdaKV(floor=2), r"floor must be a share in \[0, 1\], got 2"),
        (lambda: LMInfinite(20, max_distance=0), r"max_distance must be an int .* got 0"),
        # Combinations that mean nothing.
        (lambda: AdaKV(Full()), r"Full\(.*keeps every token: there is no budget to share"),
        (lambda: AdaKV(AdaKV()), r"shares budgets over heads already"),
        (lambda: AdaKV(TopK()), r"AdaKV cannot be combined with TopK\(.*which stores every token"),
        (lambda: AdaKV("snapkv"), r"wraps a jaxkv.Policy, got 'snapkv'"),
        (lambda: ChunkKV(H2O(8)), r"wrap a policy that drops at the prompt, such as SnapKV"),
        (lambda: CriticalKV(jaxkv.Knorm(8)), r"each need the one number that a token may carry"),
        (lambda: plus_heavy(H2O(8)), r"H2O\(.*is none: wrap one that drops tokens at every step"),
        (lambda: SnapKV(64, positions="ceiling"), r"'ceiling' is for policies with a limit"),
        (lambda: SnapKV(64, positions="cyclic"), r"positions must be one of .*got 'cyclic'"),
        (lambda: ExpectedAttention(64, positions="rolling"), r"reasons about original positions"),
        (lambda: RKV(64, positions="rolling"), r"remembers queries at original positions"),
        (lambda: Quest(64, positions="rolling"), r"bounds keys at original positions"),
        (lambda: H2O(8, mode="mask", positions="rolling"), r"keeps every token where it is"),
        (lambda: Compose(SnapKV(64), H2O(32)), r"prompt has 64 and decode 32"),
        (lambda: Compose(Full(), H2O(32)), r"the prompt's policy drops nothing"),
        (lambda: Compose(SnapKV(64), SnapKV(64)), r"use decode=Full\(\)"),
        (lambda: Compose(SnapKV(64), AdaKV(H2O(64))), r"works from the prompt on"),
        (lambda: Compose(SnapKV(64), Streaming(64)), r"'original' and 'rolling'.*must be the same"),
        (lambda: Compose(H2O(64), jaxkv.Scissorhands(64)), r"remember scores, of different kinds"),
        (lambda: Compose(SnapKV(64), TopK(64)), r"topk cannot be a part of another policy"),
        (lambda: Compose("h2o", H2O(64)), r"prompt and decode must be policies, got 'h2o'"),
        # Tables of heads.
        (lambda: DuoAttention(80, retrieval=[1, 0]), r"one row per layer and one column"),
        (lambda: DuoAttention(80, retrieval=[[1], [1, 0]]), r"must be a table of booleans"),
        (lambda: KVzap(64, surrogate="fitted"), r"must be a jaxkv.Surrogate, got 'fitted'"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be(make, match):
    refused(match, make)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ("duo_attention", r"jaxkv.analyze.retrieval_heads"),
        ("kvzap", r"jaxkv.analyze.fit_surrogate"),
        (
            DuoAttention(80, retrieval=[[True, False]]),
            r"for 1 layers of 2 KV heads, the model has 3 layers of 2",
        ),
        (Best(8, profile=[[1.0]]), r"for 1 layers of 1 KV heads, the model has 3 layers of 2"),
        (H2O(8, mode="lm_eval"), r"only scores given texts"),
        (SnapKV(0.2), r"of a prompt of 3 tokens is 1, which is below"),
    ],
    ids=str,
)
def test_policies_that_do_not_fit_a_model_or_a_prompt(small, policy, match):
    refused(match, lambda: jaxkv.generate(small, [5, 6, 7], policy=policy))


@pytest.mark.parametrize("chunk", [1, 0, 2.5, True])
def test_chunks(small, chunk):
    refused(
        rf"prefill_chunk must be an int >= 2, got {chunk}",
        lambda: jaxkv.generate(small, [5, 6, 7], prefill_chunk=chunk),
    )


def test_policies_that_judge_a_whole_prompt_do_not_take_chunks(small):
    refused(
        r"kvzip judges a prompt when all of it has been read, so prefill_chunk=16",
        lambda: jaxkv.generate(small, [5, 6, 7], policy=KVzip(8), prefill_chunk=16),
    )
    refused(r"give a prompt", lambda: jaxkv.perplexity(small, [5, 6, 7], policy=KVzip(8)))


def test_what_drops_nothing_cannot_go_on_for_ever(small):
    long = [5] * (small.config.max_positions + 1)
    refused(
        r"full drops nothing, and \d+ tokens do not fit",
        lambda: jaxkv.generate(small, long, policy=Full(positions="rolling")),
    )
