"""One measurement of jaxkv, in a process of its own; `benchmark_peers.py` runs it.

python cell_ours.py CELL_IN_JSON      # prints one line of JSON
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
from benchmark import decode_cell, prompt_cell, read_bandwidth
from cell_theirs import peak_beyond, status

import jaxkv
from jaxkv.evaluate.perplexity import perplexities


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    params = jaxkv.load(cell["model"])
    kept = cell["kept"] or cell["tokens"]
    if cell["case"] == "perplexity":
        scored = perplexities(
            params, cell["ids"], policy=cell["policy"], budgets=[kept], prompt=cell["tokens"]
        )
        return {"perplexity": scored[0][0].perplexity}
    if cell["case"] == "decode":
        run = decode_cell(params, cell["batch"], kept, cell["policy"])
        bandwidth = read_bandwidth()
        result, limits = run(), [bandwidth()]
        limits += [bandwidth() for _ in range(2)]
        limit = statistics.median(limits)
        share = result["bytes"] / (result["ms"] / 1e3) / limit
        return {
            "ms": result["ms"],
            "cache_mb": result["cache_mb"],
            "compile_s": result["compile_s"],
            "weight_bytes": params.nbytes,
            "bandwidth": limit,
            "share_of_bandwidth": share,
        }
    # Compiling comes first: what memory it takes is not the prompt's.
    run = prompt_cell(params, cell["ids"][0], cell["policy"], cell["kept"])
    result, _, grown = peak_beyond(run)
    return {"ms": result["ms"], "compile_s": result["compile_s"], "extra_mb": grown / 1e6}


if __name__ == "__main__":
    found = measure(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    found["versions"] = {"jaxkv": jaxkv.__version__, "jax": jax.__version__}
    print(json.dumps(found | {"peak_mb": status("VmHWM") / 1e6}))
