"""What `scripts/benchmark.py --vs` makes of measurements; the peers themselves are not run here."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def peers():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import benchmark_peers
    finally:
        sys.path.remove(str(SCRIPTS))
    return benchmark_peers


def test_a_record_is_medians_and_their_ratio(peers):
    cell = peers.Cell("decode", "transformers", "full", 8, 820)
    ours = [
        {
            "ms": ms,
            "cache_mb": 300.0,
            "weight_bytes": 5e8,
            "bandwidth": 2e10,
            "versions": {"a": "1"},
        }
        for ms in (100.0, 50.0, 90.0)
    ]
    theirs = [{"ms": ms, "cache_mb": 500.0, "versions": {"b": "2"}} for ms in (200.0, 180.0, 1e4)]
    record = peers._record(cell, ours, theirs)
    assert (record["ms"], record["peer_ms"], record["repeats"]) == (90.0, 200.0, 3)
    assert record["ratio"] == pytest.approx(200 / 90)
    # A thousand megabytes in 0.2 s, of 20 GB/s.
    assert record["peer_share_of_bandwidth"] == pytest.approx(0.25)
    assert record["versions"] == {"a": "1", "b": "2"}
    assert "extra_mb" not in record
    assert "| 200.0 | 90.0 | 2.22 |" in peers.table([record])
    assert "200.0 ms, ours 90.0 (2.22)" in peers.line(record)


def test_rows_are_as_long_as_asked_and_differ(peers):
    for cell in peers.CELLS:
        rows = peers._rows(list(range(5000)), cell)
        scored = peers.SCORED if cell.case == "perplexity" else 0
        assert {len(row) for row in rows} == {cell.tokens + scored}
        assert len({tuple(row[:8]) for row in rows}) == cell.batch


def test_a_peer_that_fails_says_why(peers):
    program = "import sys; print('noise', file=sys.stderr); sys.exit('no such press')"
    with pytest.raises(peers.PeerError, match="no such press"):
        peers._run([sys.executable, "-c", program])
    with pytest.raises(peers.PeerError, match="exit status 3"):
        peers._run([sys.executable, "-c", "raise SystemExit(3)"])


def test_every_cell_has_a_peer_that_can_be_installed(peers):
    for cell in peers.CELLS:
        assert any(r.startswith("torch==") for r in peers.REQUIREMENTS[cell.peer])
    for peer in peers.PEERS:
        assert any(cell.quick for cell in peers.CELLS if cell.peer == peer)
