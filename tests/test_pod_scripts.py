"""The scripts about PoD, on two layers of a small model: what they say must be so."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import PoD, PodPlan, Streaming, loops
from jaxkv.evaluate.perplexity import perplexities
from jaxkv.room import plan

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def script():
    """Imports a script by name."""
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def main(script, shallow, tmp_path, monkeypatch, capsys):
    """Runs a script on the first layers of a model; gives its records and what it printed."""
    monkeypatch.setattr(jaxkv, "load", lambda name: shallow)

    def run(name, *arguments):
        file = tmp_path / "records.json"
        script(name).main([*map(str, arguments), "--json", str(file)])
        return json.loads(file.read_text()), capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def pod_plan(shallow):
    """Two heads of three follow, with maps that change nothing."""
    config = shallow.config
    maps = np.tile(np.eye(config.head_dim, dtype=np.float32), (2, config.num_heads, 1, 1))
    return PodPlan.for_config(((0, 0, 0), (0, 1, 0)), config, maps=maps)


def test_what_near_tokens_decide_is_what_a_cache_of_them_decides(main, script, shallow, story):
    # A step sees what is stored, and itself.
    policy = Streaming(budget=15, sinks=4, positions="original")
    tokens = jnp.array([story[:96]], jnp.int32)
    choices = script("pod_near_tokens").choices(shallow.weights(), tokens, 12, 4)
    planned = plan(shallow, policy, [96], new=96, grow=96)
    budgets = jnp.array(planned.budgets)
    cache = loops.empty_cache(planned.weights, planned.policy, budgets, planned.slots)
    _, _, hits = loops.score_tokens(
        planned.weights, cache, tokens, choices[None], jnp.array([96]), planned.policy, False
    )
    assert hits.tolist() == [96]

    numbers = ("--length", 128, "--count", 2, "--sinks", 4, "--near", 8, 64, 126)
    records, told = main("pod_near_tokens", *numbers)
    assert [r["positions"] for r in records] == [2 * (127 - r["near"]) for r in records]
    few, many, all_but_one = (r["unchanged"] for r in records)
    assert 0 < few < many <= 1
    assert 0 <= all_but_one <= 1
    assert f"| 8 | {few:.1%} |" in told


def test_perplexity_is_told_against_what_is_saved(main, tmp_path):
    picture = tmp_path / "saving.png"
    records, told = main(
        "pod_saving_vs_quality",
        *("--savings", 0.2, "--saving", 0.2, "--recents", 12, "--taus", 0.5),
        *("--near", 4, 28, "--tokens", 144, "--prompt", 96, "--count", 1, "--picture", picture),
        *("--explore", 1, "--explore-length", 96, "--repair", 2, "--repair-length", 96),
    )
    assert all(1 < r["perplexity"] < np.inf for r in records)
    by = {(r["sweep"], r["method"], *(r.get("skip") or ())): r for r in records}
    assert len(by) == len(records) == 8
    full, plain, repaired = (by["saving", name] for name in ("full", "PoD", "PoD, repaired"))
    for record in (plain, repaired):
        assert record["target"] == 0.2 <= record["saving"]
        assert record["saved"] == pytest.approx(record["saving"] * (96 - 32) / 96)
        assert record["cache_bytes"] < full["cache_bytes"]
    assert repaired["perplexity"] != plain["perplexity"]
    for policy in ("h2o", "snapkv"):
        assert by["saving", policy]["kept"] == round(96 * (1 - plain["saved"]))
        assert by["saving", policy]["saved"] == pytest.approx(plain["saved"], abs=0.01)
    few = by["near", "PoD, repaired"]
    assert few["recent"] == 12
    assert few["saved"] > repaired["saved"]
    for form, parts in (("exact", 0.5), ("predicted", 1)):
        record = by["skip", "PoD, repaired", form, 0.5]
        assert 0 < record["skipped"] <= 1
        # Of the keys and values of distant tokens, of heads that follow.
        distant = np.mean([(length - 32) / length for length in range(96, 144)])
        followers = 2 * record["saving"]
        want = record["skipped"] * followers * distant * parts
        assert record["attention_saved"] == pytest.approx(want)
    assert picture.stat().st_size > 1000
    assert told.count("| --- |") == 3


def test_rivals_are_trained_on_the_same_tokens(main, pod_plan, story, shallow, tmp_path):
    pod_plan.save(tmp_path / "plan.json")
    text = tmp_path / "text.txt"
    text.write_text(shallow.tokenizer.decode(story) * 2)
    forms = ("pod", "dense", "window", "cla")
    records, told = main(
        "pod_adapt",
        *("--plan", tmp_path / "plan.json", "--out", tmp_path / "out", "--texts", text),
        *("--forms", *forms, "--steps", 2, "--every", 1, "--count", 1),
        *("--length", 64, "--near", 4, 12),
    )
    assert [(r["form"], r["step"]) for r in records] == [
        ("full", 0), *((form, step) for form in forms for step in range(3)),
    ]  # fmt: skip
    full, *_ = (r["perplexity"] for r in records)
    found = {(r["form"], r["step"]): r["perplexity"] for r in records}
    assert found["dense", 0] == full
    assert len({full, *(found[form, 0] for form in forms)}) == 4
    assert all(found[form, 2] != found[form, 0] for form in forms)
    assert f"| 2 | {' | '.join(f'{found[form, 2]:.2f}' for form in forms)} |" in told
    assert "dense: " in told


def test_needles_are_looked_for_under_everyone(main, pod_plan, shallow, tmp_path):
    from safetensors.numpy import save_file

    pod_plan.save(tmp_path / "plan.json")
    weight = shallow.state["layers"][0]["self_attn"]["q_proj"]["weight"]
    path = "layers.0.self_attn.q_proj.weight"
    save_file({path: np.asarray(weight)}, tmp_path / "weights.safetensors")
    records, told = main(
        "pod_needle",
        *("--plan", tmp_path / "plan.json", "--weights", tmp_path, "--near", 4, 60),
        *("--lengths", 160, "--depths", 0.25, "--needles", 1),
    )
    methods = ["full", "PoD", "PoD, no maps", "PoD, adapted", "streaming", "h2o", "snapkv"]
    assert [r["method"] for r in records] == methods
    by = {r["method"]: r for r in records}
    # The whole cache holds the context, without the question.
    context = round(by["full"]["kept"])
    assert 130 < context < 160
    saved = pod_plan.saving_at(context, sinks=4, recent=60)
    for method in methods[1:4]:
        assert by[method]["saved"] == saved
    for method in methods[4:]:
        assert by[method]["kept"] == round(context * (1 - saved))
        assert by[method]["saved"] == pytest.approx(saved, abs=0.01)
    assert records[0]["depths"] == sorted({0, 0.25, 0.5, 1, records[0]["chance"]})
    # The maps change nothing, and the weights are the model's own.
    for method in ("PoD", "PoD, adapted"):
        np.testing.assert_allclose(
            by[method]["logprobs"], by["PoD, no maps"]["logprobs"], rtol=1e-3
        )
    assert "| near window |" in told
    assert f"| anywhere ({records[0]['chance']:g}) |" in told


def test_plans_of_other_thresholds_need_no_texts(shallow, story):
    options = {"length": 96, "last_rows": 32}
    found = jaxkv.pod.explore(shallow, [story[:96]], **options)
    for wanted in ({"threshold": 0.3}, {"threshold": 0.9}, {"target_saving": 0.2}):
        explored = jaxkv.pod.explore(shallow, [story[:96]], **wanted, **options)
        again = jaxkv.pod.replan(found, **wanted)
        assert again == explored
        assert again.settings == explored.settings
    maps = np.zeros((2, 9, 64, 64), np.float32)
    mended = dataclasses.replace(found, maps=maps, settings={**found.settings, "repair": {}})
    assert jaxkv.pod.replan(mended).maps is None
    assert "repair" not in jaxkv.pod.replan(mended).settings
    bare = dataclasses.replace(found, similarity=None)
    with pytest.raises(ValueError, match="the plan holds no similarities: it was not made by"):
        jaxkv.pod.replan(bare)
    with pytest.raises(ValueError, match=r"threshold must be a number in \[0, 1\], got 2"):
        jaxkv.pod.replan(found, threshold=2)


def test_what_is_skipped_is_told_of_policies_that_skip(shallow, story, pod_plan):
    def scored(policy):
        return perplexities(shallow, [story[:64], story[20:84]], policy=policy)[0]

    whole, never, always = (
        scored(PoD(pod_plan, 2, 14, skip=skip))
        for skip in (None, ("exact", 1.5), ("predicted", 1e-9))
    )
    assert [one.skipped for one in whole] == [None, None]
    assert [one.skipped for one in never] == [0, 0]
    assert [one.skipped for one in always] == [1, 1]
    for some, one in zip(never, whole, strict=True):
        assert some.perplexity == pytest.approx(one.perplexity, rel=1e-4)
    alone = PodPlan.without_sharing(shallow.config)
    assert scored(PoD(alone, 2, 14, skip=("exact", 0.5)))[0].skipped == 0


# The largest batch: what surrounds the compiler.


@pytest.fixture(scope="module")
def max_batch(script):
    return script("pod_max_batch")


@pytest.mark.parametrize("most", [0, 1, 2, 9, 17, 40])
@pytest.mark.parametrize("guess", [-1, 1, 8, 17, 60])
def test_the_largest_batch_is_found_whatever_the_guess(max_batch, most, guess):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= most

    assert max_batch.largest(fits, guess) == most
    assert most + 1 in tried
    assert len(set(tried)) == len(tried)
    if guess == most:
        assert tried == [most, most + 1]


def test_a_made_up_plan_shares_evenly(max_batch):
    config = max_batch.LLAMA_3_8B
    made = max_batch.made_up_plan(config, 0.7)
    assert made.saving == pytest.approx(0.35, abs=0.002)
    by_head = np.sum(np.array(made.root) != np.arange(32)[:, None], 0)
    assert by_head.max() - by_head.min() <= 1
    for head in range(8):
        _, sizes = np.unique(np.array(made.root)[:, head], return_counts=True)
        assert sizes.max() - sizes.min() <= 1
    with pytest.raises(ValueError, match=r"--share must be above 0 and at most 0.96875, got 1.0"):
        max_batch.made_up_plan(config, 1.0)


def test_a_table_says_who_decodes_more(max_batch):
    told = "RESOURCE_EXHAUSTED: ... required (32.25G) exceeds available HBM (31.25G)."
    assert max_batch.available(told) == 31.25 * 2**30
    assert max_batch.available("RESOURCE_EXHAUSTED: too much") is None
    policies = max_batch.methods(max_batch.made_up_plan(max_batch.LLAMA_3_8B, 0.7), 8192, 0.125)
    assert list(policies) == ["full", "PoD", "SnapKV", "PoD + SnapKV"]
    assert policies["PoD + SnapKV"].of == policies["SnapKV"]
    common = {"model": "m", "saving": 0.35, "length": 8192, "available_bytes": 31.25 * 2**30}
    record = {**common, "sequence_bytes": 2**30, "temporary_bytes": 2**29}
    none = {**common, "sequence_bytes": 2**30, "chip": "small", "method": "full", "batch": 0}
    table = max_batch.report(
        [
            {**record, "chip": "large", "method": "full", "batch": 16},
            {**record, "chip": "large", "method": "PoD", "batch": 20},
            none,
        ]
    )
    assert "| large | 8192 | PoD | 20 | +25% | 1.00 | 0.50 | 31.25 |" in table
    assert "| small | 8192 | full | does not fit |  | 1.00 |  | 31.25 |" in table


def test_plans_are_explored_and_repaired(main, story, shallow, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(shallow.tokenizer.decode(story) * 2)
    records, told = main(
        "pod_explore",
        *("--out", tmp_path / "pod", "--texts", text, "--savings", 0.1, "--explore", 2),
        *("--explore-length", 96, "--repair", 2, "--repair-length", 80),
        *("--length", 96, "--count", 1, "--near", 4, 12),
    )
    made = PodPlan.load(tmp_path / "pod" / "plan_10.json")
    assert made.saving >= 0.1
    assert made.maps is not None
    assert made.settings["over"] == "min"
    assert (tmp_path / "pod" / "plan_10.png").stat().st_size > 1000
    full, chosen = records
    assert len({full["perplexity"], chosen["perplexity"], chosen["repaired"]}) == 3
    assert f"{chosen['repaired']:.2f}" in told


# What cannot be.


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("pod_near_tokens", ("--texts", "missing.txt"), "cannot read missing.txt: "),
        ("pod_near_tokens", ("--near", 16), "--near must be above --sinks=16 and below --length="),
        ("pod_near_tokens", ("--length", 9000), "does not fit the 8192 positions of"),
        ("pod_near_tokens", ("--near", "x"), "invalid int value: 'x'"),
        ("pod_saving_vs_quality", ("--near", 16), "--near takes two numbers, first and latest"),
        ("pod_saving_vs_quality", ("--near", 16, 900), "leaves no distant tokens in a prompt of"),
        ("pod_saving_vs_quality", ("--prompt", 1024), "--prompt must be above 1 and below"),
        ("pod_needle", ("--plan", "missing.json"), "there is no plan missing.json: make one"),
        ("pod_needle", ("--keep", 0), "--keep must be in (0, 1], got 0.0"),
        ("pod_max_batch", ("--chips", "v9"), "unknown chips: v9; there are v5e, v6e, v5p"),
    ],
)
def test_errors_are_one_line(script, shallow, monkeypatch, capsys, name, arguments, told):
    monkeypatch.setattr(jaxkv, "load", lambda name: shallow)
    with pytest.raises(SystemExit) as ended:
        script(name).main([*map(str, arguments)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
