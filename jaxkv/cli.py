"""`jaxkv ...`: generate, chat, perplexity, policies, models. Errors are one line, exit code 2."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxkv.errors import first_line
from jaxkv.pod.commands import app as pod_app
from jaxkv.policies.base import get_writer

app = typer.Typer(
    help="Language models with a compressed key-value cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(pod_app, name="pod")
out = Console(highlight=False)
#: Wrong options and missing arguments. Typer may carry its own copy of click, where this lives.
UsageError: Any = typer.BadParameter.__bases__[0]

Model = Annotated[str, typer.Argument(help="a known name, a Hugging Face id, a folder or a .gguf")]
PolicyName = Annotated[str, typer.Option(help="which tokens are kept; see `jaxkv policies`")]
Budget = Annotated[
    str | None,
    typer.Option(help="tokens kept per KV head (204), or a fraction of the prompt (0.2)"),
]
MaxNew = Annotated[int, typer.Option(help="new tokens at most")]
Temperature = Annotated[float, typer.Option(help="0 is greedy")]
Seed = Annotated[int, typer.Option(help="of the draws")]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="text, or - for standard input")],
    policy: PolicyName = "full",
    budget: Budget = None,
    max_new_tokens: MaxNew = 128,
    temperature: Temperature = 0.0,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="ends the text; may be repeated")] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="read the prompt in pieces of so many tokens")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="use the model's chat template")] = False,
    plan: Annotated[
        Path | None, typer.Option(help="share keys by this plan of `jaxkv pod explore`")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="weights that `jaxkv pod adapt` left in this folder")
    ] = None,
    near: Annotated[
        tuple[int, int],
        typer.Option(help="with --plan: first and latest tokens that do not share"),
    ] = (16, 4080),
    report: Annotated[bool, typer.Option(help="say what was kept and how fast")] = True,
) -> None:
    """Continue a text (or, with --chat, answer it)."""
    import jaxkv

    text = sys.stdin.read() if prompt == "-" else prompt
    chosen: Any = policy
    if plan is not None:
        found = jaxkv.PodPlan.load(plan)
        kept = get_writer(policy, _budget(budget))
        chosen, budget = jaxkv.PoD(found, *near, of=kept), None
    params = jaxkv.load(model)
    if weights is not None:
        params = jaxkv.pod.with_weights(params, weights)
    pieces = jaxkv.stream(
        params,
        [{"role": "user", "content": text}] if chat else text,
        policy=chosen,
        budget=_budget(budget),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        prefill_chunk=prefill_chunk,
    )
    result = _print_pieces(pieces)
    if report:
        Console(stderr=True, highlight=False).print(f"\n{result.report}", style="dim")


@app.command()
def chat(
    model: Model,
    policy: PolicyName = "streaming",
    budget: Budget = None,
    max_new_tokens: MaxNew = 512,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
) -> None:
    """Talk with a model; all turns share one compressed cache. An empty line ends."""
    import jaxkv

    params = jaxkv.load(model)
    session = jaxkv.Session(params, policy=policy, budget=_budget(budget))
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    messages = [{"role": "system", "content": system}] if system else []
    read: list[int] = []
    while text := _ask():
        messages.append({"role": "user", "content": text})
        ids = params.tokenizer.chat(messages) if params.tokenizer else []
        if session.past is not None and ids[: len(read)] == read and len(ids) > len(read):
            pieces = session.stream(ids[len(read) :], **options)
        else:
            if session.past is not None:
                out.print("[dim]the chat template changed earlier turns: read anew[/dim]")
                session.rewind(None)
            pieces = session.stream(messages, **options)
        answer = _print_pieces(pieces)
        messages.append({"role": "assistant", "content": answer.text})
        # What the cache has read, and the token that is still to be fed.
        read = ids + answer.tokens
        kept, evicted = answer.report.kept[0][0], answer.report.evicted[0][0]
        out.print(f"[dim]{kept} of {kept + evicted} tokens kept[/dim]")


@app.command()
def perplexity(
    model: Model,
    file: Annotated[Path, typer.Argument(help="a text file")],
    policy: PolicyName = "full",
    budget: Budget = None,
    max_tokens: Annotated[int, typer.Option(help="of the file, from its start", min=2)] = 1024,
) -> None:
    """Perplexity of a text, read one token at a time with a compressed cache."""
    import jaxkv

    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    params = jaxkv.load(model)
    text = file.read_text(encoding="utf-8")
    if params.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer")
    ids = params.tokenizer.encode(text)[:max_tokens]
    value = jaxkv.perplexity(params, ids, policy=policy, budget=_budget(budget))
    out.print(f"perplexity {value:.4f} over {len(ids)} tokens, policy {policy}")


@app.command()
def policies() -> None:
    """List the policies, one line each: name, what it keeps, what memory it frees, source."""
    from jaxkv.policies import registered

    rows = [("name", "keeps", "frees", "source")]
    rows += [(name, p.keeps, p.frees, p.source) for name, p in registered().items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        out.print("  ".join(cells).rstrip(), soft_wrap=True, markup=False)


@app.command()
def models() -> None:
    """List known models and the architectures that can be loaded."""
    from jaxkv import hub
    from jaxkv.models.registry import ARCHITECTURES

    table = Table("name", "what", "on disk", box=None)
    for name, model in hub.KNOWN.items():
        table.add_row(name, model.about, "yes" if hub.packaged_path(name).exists() else "no")
    out.print(table)
    out.print(f"\nArchitectures: {', '.join(ARCHITECTURES)}")
    out.print("from a Hugging Face id, a folder with safetensors, or a .gguf file (llama, qwen).")


def _ask() -> str:
    try:
        return out.input("[bold]> [/bold]").strip()
    except EOFError:
        return ""


def _budget(text: str | None) -> int | float | None:
    if text is None:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ValueError(f"budget must be an int >= 1 or a float in (0, 1], got {text!r}")


def _print_pieces(pieces: Any) -> Any:
    """Prints pieces as they come and gives back what the iterator returns at its end."""
    while True:
        try:
            print(next(pieces), end="", flush=True)
        except StopIteration as end:
            print()
            return end.value


def main() -> None:
    """The command: errors that the user can mend become one line and exit code 2."""
    try:
        raise SystemExit(app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0)
    except (ValueError, OSError, RuntimeError, UsageError) as error:
        text = error.format_message() if isinstance(error, UsageError) else str(error)
        line = " ".join(text.split()) or type(error).__name__
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"jaxkv: {line}", style="red", markup=False
        )
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get("JAXKV_TRACEBACK"):
            raise
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"jaxkv: {type(error).__name__}: {first_line(error)} (this is a bug; set "
            "JAXKV_TRACEBACK=1 to see where)",
            style="red",
            markup=False,
        )
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
