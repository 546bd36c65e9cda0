"""Several texts and budgets in one batch are scored as each alone."""

import pytest

import jaxkv
from jaxkv.evaluate.perplexity import perplexities
from jaxkv.policies import get

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.parametrize(("policy", "prompt"), [("h2o", 0), ("adakv", 90), ("topk", 90)])
def test_rows_have_their_own_budgets(shallow, story, policy, prompt):
    texts, budgets = [story[:120], story[200:310]], [0.4, 0.7]
    found = perplexities(shallow, texts, policy=policy, budgets=budgets, prompt=prompt)
    assert found[0][0].perplexity != pytest.approx(found[1][0].perplexity, rel=1e-3)
    for number in (0, 1):
        text, scored, budget = texts[number], found[number][number], budgets[number]
        alone = jaxkv.perplexity(shallow, text, policy=policy, budget=budget, prompt=prompt)
        assert scored.perplexity == pytest.approx(alone, rel=1e-4)
        # The last token is not read; the prompt's last one is the first that is fed.
        want = {"always": round(budget * len(text)), "never": len(text) - 1}
        want["prompt"] = round(budget * 90) + len(text) - 90
        assert scored.kept == pytest.approx(want[get(policy).drops])


@pytest.mark.parametrize("policy", ["full", "adakv", "r_kv"])
def test_bytes_are_those_of_generation(shallow, story, policy):
    prompt, new = 90, 20
    chosen = get(policy, None if policy == "full" else 0.4)
    (scored,) = perplexities(shallow, [story[: prompt + new]], policy=chosen, prompt=prompt + 1)[0]
    # The last token is not read, here nor there.
    out = jaxkv.generate(
        shallow, story[:prompt], policy=chosen, max_new_tokens=new, ignore_eos=True
    )
    assert scored.cache_bytes == out.report.cache_bytes


def test_accuracy_is_the_share_of_greedy_choices(shallow, story):
    out = jaxkv.generate(shallow, story[:40], max_new_tokens=12, ignore_eos=True)
    text = story[:40] + out.tokens
    ((scored,),) = perplexities(shallow, [text], prompt=40)
    assert scored.accuracy == 1.0
    ((scored,),) = perplexities(
        shallow, [[*text[:-3], (text[-3] + 1) % 100, *text[-2:]]], prompt=40
    )
    assert scored.accuracy < 1.0


def test_texts_scored_whole_have_one_length(shallow, story):
    with pytest.raises(ValueError, match="same number of tokens, got 8 and 10"):
        perplexities(shallow, [story[:8], story[:10]], policy=jaxkv.H2O(mode="lm_eval"))


def test_what_follows_a_judged_prompt_is_stored_whole_in_blocks_as_well(small):
    text, policy = [5 + i % 50 for i in range(0, 240, 3)], jaxkv.KVzip(16, level="uniform")
    one, blocks = (
        jaxkv.perplexity(small, text, policy=policy, prompt=32, block=block) for block in (1, 16)
    )
    assert blocks == pytest.approx(one, rel=1e-4)
