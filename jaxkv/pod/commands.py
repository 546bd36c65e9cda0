"""`jaxkv pod ...`: explore, repair, adapt, show."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(help="Share the keys of distant tokens between similar layers (PoD).")
out = Console(highlight=False)

Model = Annotated[str, typer.Argument(help="a known name, a Hugging Face id, a folder or a .gguf")]
Texts = Annotated[list[Path], typer.Option(help="a text file; may be repeated")]
Plan = Annotated[Path, typer.Option(help="a plan that `jaxkv pod explore` wrote")]
Picture = Annotated[Path | None, typer.Option(help="also draw it here (.png, .svg, .pdf)")]


@app.command()
def explore(
    model: Model,
    texts: Texts,
    threshold: Annotated[float, typer.Option(help="similarity from which layers share")] = 0.5,
    target_saving: Annotated[
        float | None, typer.Option(help="choose the threshold that saves this share, such as 0.35")
    ] = None,
    count: Annotated[int, typer.Option(help="pieces of text to look at", min=1)] = 4,
    length: Annotated[int, typer.Option(help="tokens of each")] = 1024,
    last_rows: Annotated[int, typer.Option(help="queries at the end of each to compare")] = 64,
    returning: Annotated[
        float, typer.Option(help="share of each that comes again at its end", min=0, max=0.5)
    ] = 0.46875,
    over: Annotated[
        str, typer.Option(help="how query heads of a KV head are put together: min, mean")
    ] = "min",
    plan: Annotated[Path, typer.Option(help="write the plan here")] = Path("plan.json"),
    picture: Picture = None,
) -> None:
    """Find which layers attend alike, and write a plan of which share keys."""
    import jaxkv

    params = jaxkv.load(model)
    rows: Any = jaxkv.pod.pieces(params, _read(texts), length, count=count)
    if returning:
        rows = jaxkv.pod.returning(rows, int(returning * length))
    found = jaxkv.pod.explore(
        params,
        rows,
        over=over,  # type: ignore[arg-type]
        threshold=threshold,
        target_saving=target_saving,
        length=length,
        last_rows=last_rows,
    )
    found.save(plan)
    out.print(str(found))
    out.print(f"threshold {found.settings['threshold']:.3f}; written to {plan}")
    if picture is not None:
        jaxkv.pod.draw(found, picture)


@app.command()
def repair(
    model: Model,
    plan: Plan,
    texts: Texts,
    count: Annotated[int, typer.Option(help="pieces of text to fit on", min=1)] = 56,
    length: Annotated[int, typer.Option(help="tokens of each")] = 512,
    to: Annotated[
        Path | None, typer.Option(help="write the plan with its maps here (default: in place)")
    ] = None,
) -> None:
    """Fit a plan's maps of far queries, so that attention under it is nearly the model's own."""
    import jaxkv

    found = jaxkv.PodPlan.load(plan)
    params = jaxkv.load(model)
    rows = jaxkv.pod.pieces(params, _read(texts), length, count=count)
    repaired = jaxkv.pod.repair(params, found, rows, length=length)
    repaired.save(to or plan)
    errors: Any = repaired.settings["repair"]["error"]
    before, after = (sum(row[i] for row in errors) / max(len(errors), 1) for i in (1, 3))
    out.print(
        f"error of attention outputs, mean over {len(errors)} layers: {before:.3f} -> {after:.3f}"
    )
    out.print(f"written to {to or plan}")


@app.command()
def adapt(
    model: Model,
    plan: Plan,
    texts: Texts,
    to: Annotated[Path, typer.Option(help="folder for checkpoints, log and weights")],
    steps: Annotated[int, typer.Option(help="updates")] = 200,
    length: Annotated[int, typer.Option(help="tokens of a row")] = 512,
    batch: Annotated[int, typer.Option(help="rows of a batch")] = 4,
    near: Annotated[
        tuple[int, int], typer.Option(help="how many first and latest tokens do not share")
    ] = (16, 240),
    learning_rate: Annotated[float, typer.Option(help="the highest")] = 1e-4,
    distill: Annotated[
        float, typer.Option(help="weight of the dense model's predictions, 0 to 1")
    ] = 1.0,
    rope_base: Annotated[
        float | None, typer.Option(help="another base of the rotary embedding, for longer texts")
    ] = None,
    save_every: Annotated[int, typer.Option(help="updates between checkpoints")] = 50,
) -> None:
    """Train a model a little under a plan. Interrupted, the same command goes on."""
    import jaxkv

    found = jaxkv.PodPlan.load(plan)
    documents = [part for text in _read(texts) for part in text.split("\n\n\n") if part.strip()]
    params = jaxkv.load(model)
    jaxkv.pod.adapt(
        params,
        documents,
        policy=jaxkv.PoD(found, *near),
        folder=to,
        steps=steps,
        length=length,
        batch=batch,
        learning_rate=learning_rate,
        distill=distill,
        rope_base=rope_base,
        save_every=save_every,
    )
    out.print(
        f"written to {to}; generate with --plan {plan} --weights {to} --near {near[0]} {near[1]}"
    )


@app.command()
def show(plan: Annotated[Path, typer.Argument(help="a plan")], picture: Picture = None) -> None:
    """Say what a plan shares and saves."""
    import jaxkv

    found = jaxkv.PodPlan.load(plan)
    out.print(str(found))
    for length in (8192, 16384, 32768):
        out.print(f"{length} tokens, 4096 of them near: {found.saving_at(length):.1%} saved")
    if picture is not None:
        jaxkv.pod.draw(found, picture)


def _read(files: list[Path]) -> list[str]:
    for file in files:
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
    return [file.read_text(encoding="utf-8") for file in files]
