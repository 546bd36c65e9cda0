"""Text from a real model under the full cache and under a compressed one, side by side."""

import argparse

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import jaxkv
from jaxkv.policies import get

PROMPT = """\
Summarise this story:

The lighthouse at Grey Point had not been lit for eleven years when Marta bought it. The agent
who sold it to her was honest about the roof, which leaked, and about the road, which flooded
every spring, but he did not mention the birds. There were hundreds of them. They slept on the
gallery, on the sills, on the rusted rail, and when Marta opened the door on the first morning
they rose all at once, like a sheet shaken out by the wind.

She had been a watchmaker for thirty years, and she had a watchmaker's patience. She mended the
roof with slate from a barn that had fallen down. She drained the road with a ditch she dug
herself, a few metres a day, through the whole of the summer. In the evenings she climbed the
hundred and twelve steps to the lamp room and took the old clockwork apart, piece by piece, and
laid every wheel on a white cloth, and wrote down where it belonged.

By October only one part was missing: the small brass governor that kept the lens from turning
too fast. She wrote to museums. She wrote to the family of the last keeper. Nobody had it. Then,
on the night of the first storm, one of the birds flew in through the broken pane and dropped
something on the cloth, something that shone.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", default=PROMPT, help="what to ask the model")
    parser.add_argument("--policy", default="h2o", help="to set beside `full`")
    parser.add_argument("--budget", default="0.2", help="tokens, or a fraction of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    try:
        budget = int(args.budget) if args.budget.isdigit() else float(args.budget)
    except ValueError:
        parser.error(f"budget must be a number of tokens or a fraction, got {args.budget!r}")
    console = Console(highlight=False)

    try:
        policy = get(args.policy, budget)
        params = jaxkv.load(args.model)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    chat = [{"role": "user", "content": args.prompt}]
    console.print(Panel(Text(args.prompt.strip()), title="prompt", border_style="dim"))
    results = {
        "full": jaxkv.generate(params, chat, max_new_tokens=args.max_new_tokens),
        args.policy: jaxkv.generate(
            params,
            chat,
            policy=policy,
            max_new_tokens=args.max_new_tokens,
        ),
    }
    width = max(30, console.width // 2 - 2)
    console.print(
        Columns(
            Panel(Text(result.text.strip()), title=name, width=width)
            for name, result in results.items()
        )
    )
    table = Table("", *results)
    reports = [result.report for result in results.values()]
    kept = [f"{r.kept[0][0]} of {r.kept[0][0] + r.evicted[0][0]}" for r in reports]
    table.add_row("tokens kept per head", *kept)
    table.add_row("slots", *(str(r.slots[0]) for r in reports))
    table.add_row("cache, MB", *(f"{r.cache_bytes / 1e6:.2f}" for r in reports))
    table.add_row("tokens/s decoding", *(f"{r.decode_tokens_per_second:.1f}" for r in reports))
    table.add_row("seconds for the prompt", *(f"{r.prefill_seconds:.2f}" for r in reports))
    table.add_row("seconds to compile", *(f"{r.compile_seconds:.1f}" for r in reports))
    console.print(table)


if __name__ == "__main__":
    main()
