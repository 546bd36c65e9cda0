"""Several turns on one compressed cache: reading alone, branches, places, and the disk."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import H2O, AdaKV, Session, SnapKV

pytestmark = pytest.mark.usefixtures("compiled_quickly")

#: A policy per kind of cache: slots overwritten at every step, with something remembered of each
#: token, a growing pool of heads, and rolling positions with ranks.
POLICIES = {
    "h2o": H2O(16),
    "adakv": AdaKV(SnapKV(16, window=4)),
    "streaming": jaxkv.Streaming(16),
}
OPTIONS = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": True}


@pytest.fixture(scope="module")
def context(story):
    return story[:40]


@pytest.fixture(params=POLICIES)
def session(request, shallow, context):
    return Session(shallow, policy=POLICIES[request.param]).read(context)


def arrays(session):
    return [np.asarray(x) for x in jax.tree.leaves(session.past.loop.cache)]


def test_reading_chooses_before_the_question_is_seen(session, context):
    assert session.tokens_seen == len(context)
    assert session.tokens_kept >= 16
    total = sum(int(layer.stored().sum()) for layer in session.past.loop.cache.layers)
    heads = sum(layer.budget.size for layer in session.past.loop.cache.layers)
    assert total == 16 * heads
    # Reading is what a prompt without new tokens would be: the last token waits.
    assert int(session.past.loop.token[0]) == context[-1]


def test_questions_are_branches_and_leave_the_session_where_it_is(session):
    before, questions = arrays(session), [[7, 8, 9], [5, 6, 7]]
    together = session.ask(questions, **OPTIONS)
    alone = [session.fork().generate(question, **OPTIONS) for question in questions]
    assert together.tokens == [out.tokens for out in alone]
    assert together.report.kept == [out.report.kept[0] for out in alone]
    for old, new in zip(before, arrays(session), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_fraction_is_of_the_first_text(shallow, context):
    session = Session(shallow, policy=SnapKV(0.5, window=4)).read(context)
    assert session.tokens_kept == 20
    out = session.ask([[7, 8, 9]], **OPTIONS)  # 0.5 of three tokens would be too few
    assert out.report.budget == [20]


def test_a_rewound_session_says_the_same_again(session):
    place = session.past
    first = session.generate([7, 8, 9], **OPTIONS)
    assert session.past is first
    session.rewind(place)
    again = session.generate([7, 8, 9], **OPTIONS)
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)


def test_a_saved_session_goes_on_to_the_bit(session, shallow, tmp_path):
    session.generate([7, 8, 9], **OPTIONS)
    session.save(tmp_path / "kept")
    loaded = Session.load(tmp_path / "kept", shallow)
    assert loaded.policy == session.policy
    for old, new in zip(arrays(session), arrays(loaded), strict=True):
        np.testing.assert_array_equal(new, old)
        assert new.dtype == old.dtype
    options = {**OPTIONS, "temperature": 0.8, "seed": 5}
    want = session.generate([4, 5], **options)
    got = loaded.generate([4, 5], **options)
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)

    files = (file for file in (tmp_path / "kept").rglob("*") if file.is_file())
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(ValueError, match=rf"is damaged: .*{largest.name} is not as it was written"):
        Session.load(tmp_path / "kept", shallow)
    largest.unlink()
    with pytest.raises(ValueError, match=rf"is damaged: .*{largest.name} is missing"):
        Session.load(tmp_path / "kept", shallow)


def test_streaming_moves_the_session_on(shallow):
    session = Session(shallow, policy=H2O(16)).read("Once upon a time there was")
    seen = session.tokens_seen
    pieces = session.stream(" a small", max_new_tokens=6, ignore_eos=True)
    text = "".join(pieces)
    assert session.past.text == text
    assert session.tokens_seen > seen + 6


def test_a_session_in_pieces_keeps_only_what_was_asked_for(shallow, story):
    session = Session(shallow, policy=H2O(16), prefill_chunk=16).read(story[:300])
    layers = session.past.loop.cache.layers
    assert session.tokens_kept == 16
    assert max(layer.slots for layer in layers) == 32  # 17 and padding, whatever was read
    whole = jaxkv.generate(shallow, story[:300], policy=H2O(16), prefill_chunk=16, **OPTIONS)
    alone = jaxkv.generate(
        shallow, [story[:300], story[:77]], policy=H2O(16), prefill_chunk=16, **OPTIONS
    )
    assert alone.tokens[0] == whole.tokens
    assert whole.report.slots == [32, 32]


def test_what_cannot_be(shallow, small, context, tmp_path):
    session = Session(shallow, policy=H2O(16))
    with pytest.raises(ValueError, match="has read nothing"):
        session.save(tmp_path / "a")
    with pytest.raises(ValueError, match="use read"):
        session.ask([[1, 2]])
    session.read(context)
    with pytest.raises(ValueError, match="takes a list"):
        session.ask("one")
    with pytest.raises(TypeError, match="budget belongs to the session"):
        session.generate("x", budget=3)
    with pytest.raises(ValueError, match=r"H2O\(budget=16\).*H2O\(budget=8\)"):
        Session(shallow, policy=H2O(8)).rewind(session.past)
    with pytest.raises(ValueError, match="another model"):
        Session(small, policy=H2O(16)).rewind(session.past)

    session.save(tmp_path / "kept")
    with pytest.raises(ValueError, match="exists already"):
        session.save(tmp_path / "kept")
    with pytest.raises(ValueError, match="holds no saved session"):
        Session.load(tmp_path / "none", shallow)
    with pytest.raises(ValueError, match=r"num_layers=2.*num_layers=3"):
        Session.load(tmp_path / "kept", small)
    with pytest.raises(ValueError, match=r"H2O.*Streaming"):
        Session.load(tmp_path / "kept", shallow, policy=jaxkv.Streaming(16))
    about = tmp_path / "kept" / "about.json"
    content = json.loads(about.read_text())
    about.write_text(json.dumps({**content, "dtype": "bfloat16"}))
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        Session.load(tmp_path / "kept", shallow)
    about.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(ValueError, match="newer jaxkv"):
        Session.load(tmp_path / "kept", shallow)
    about.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        Session.load(tmp_path / "kept", shallow)


@dataclasses.dataclass(frozen=True)
class Fitted(jaxkv.Policy):
    """A policy that holds more than JSON can."""

    table: object = None

    def priority(self, tokens):
        return -tokens.age.astype("float32")


def test_a_policy_that_cannot_be_written_is_given_again(shallow, context, tmp_path):
    policy = Fitted(16, table=frozenset({1}))
    Session(shallow, policy=policy).read(context).save(tmp_path / "kept")
    with pytest.raises(ValueError, match="give policy="):
        Session.load(tmp_path / "kept", shallow)
    loaded = Session.load(tmp_path / "kept", shallow, policy=policy)
    assert loaded.tokens_seen == len(context)
