"""On a mesh the same tokens are written and the same are kept as on one device, for every policy.

Eight virtual CPU devices need a process of their own, see `mesh_run.py`.
"""

import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

import jaxkv
from jaxkv.pallas_kernels import native
from jaxkv.policies import get, registered
from jaxkv.sharding import mesh_of, spec_of

RUN = Path(__file__).parent / "mesh_run.py"


def test_eight_devices_keep_and_write_what_one_does():
    run = subprocess.run([sys.executable, RUN], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    *cases, weight = map(json.loads, run.stdout.splitlines())
    wrong = [case for case in cases if not (case["tokens"] and case["kept"])]
    assert not wrong
    assert {case["policy"] for case in cases} == {n for n in registered() if not get(n).simulates}
    assert cases[-1]["decode"] == ("plain" if native._load() else "native")
    # Every device has its half of the heads.
    assert weight["parts"] == [[weight["whole"][0] // 2, weight["whole"][1]]]


FAKE_MESH = types.SimpleNamespace(shape={"data": 2, "model": 4})


@pytest.mark.parametrize(
    ("axes", "shape", "kv_heads", "spec"),
    [
        (("batch", "kv_heads", "slots", "head_dim"), (4, 8, 100, 64), None, ("data", "model")),
        (("batch", "kv_heads", "slots"), (3, 8, 100), None, (None, "model")),
        # Three KV heads cannot be divided by four: their features are not either.
        (("kv_heads", "embed"), (192, 576), 3, ()),
        (("heads", "embed"), (576, 576), 3, ()),
        (("heads", "embed"), (4096, 4096), 8, ("model",)),
        (("mlp", "embed"), (1536, 576), 3, ("model",)),
        (("vocab", "embed"), (49_151, 576), 3, ()),
    ],
)
def test_what_cannot_be_divided_evenly_is_whole_on_every_device(axes, shape, kv_heads, spec):
    found = spec_of(axes, shape, FAKE_MESH, kv_heads)
    assert tuple(found) == (*spec, *(None,) * (len(shape) - len(spec)))


def test_a_mesh_that_cannot_be_is_refused():
    count = len(jax.devices())
    with pytest.raises(ValueError, match=rf"data=2 by model={count} needs {2 * count} devices"):
        jaxkv.mesh(data=2, model=count)
    with pytest.raises(ValueError, match="model must be an int >= 1, got 0"):
        jaxkv.mesh(model=0)


def test_a_mesh_of_one_device_is_none(small):
    assert mesh_of(small) is None
