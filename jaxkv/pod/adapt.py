"""`adapt`: a light post-training of a model for the attention that it will be run with."""

import dataclasses
import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import checkpoint
from jaxkv.models.base import flatten
from jaxkv.models.params import Params
from jaxkv.pod.data import Batches
from jaxkv.pod.policy import PoD, with_maps
from jaxkv.pod.texts import check_length
from jaxkv.pod.train import Recipe, joined, placed, split, update
from jaxkv.pod.whole import Texts
from jaxkv.policies.base import Policy
from jaxkv.positions import with_base
from jaxkv.progress import each
from jaxkv.sharding import on_mesh_of

WEIGHTS = "weights.safetensors"
LOG = "log.jsonl"
_UNKNOWN = "unknown"


def adapt(
    params: Params,
    texts: Sequence[Any],
    *,
    policy: Policy,
    folder: str | os.PathLike[str],
    steps: int = 200,
    length: int = 512,
    batch: int = 4,
    save_every: int = 50,
    keep: int = 2,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    teacher: Params | None = None,
    rope_base: float | None = None,
    watch: Callable[[int, Params], Mapping[str, float]] | None = None,
    **recipe: Any,
) -> Params:
    """Trains a model a little under a policy's attention. Stopped at any moment and called again
    with the same arguments, it goes on from its last checkpoint to the same numbers.

    Args:
      params: the dense model. For a plan with maps (`jaxkv.pod.repair`) training starts from
        these.
      texts: documents: strings or token ids. Every range of their lengths gives as many rows.
      policy: whose attention is learnt, such as `jaxkv.PoD(plan, sinks=16, recent=240)`.
      folder: for checkpoints, the log (`log.jsonl`), the loss curve and the weights.
      steps: updates.
      length, batch: tokens of a row, at most the model's positions, and rows of a batch.
      save_every, keep: updates between checkpoints, and how many of them are kept.
      seed: of the order of texts.
      mesh: with axes "data" and "sequence": weights, optimiser and batch are divided over the
        first, each text over the second.
      teacher: the model whose predictions are learnt; `params` by default.
      rope_base: trains the model with another base of its rotary embedding, as the paper does for
        longer texts; it then has as many positions as `length`, if these are more than before, and
        learns the next token (`distill=0`) or from a teacher that has so many.
      watch: is told updates and model at every checkpoint; what it returns is logged.
      recipe: the other fields of `jaxkv.pod.Recipe`.

    Returns:
      The trained model, for `jaxkv.generate(adapted, prompt, policy=policy)`.

    Raises:
      ValueError: an argument is out of range, or the folder holds another training.

    """
    training = Recipe(policy=policy, steps=steps, **recipe)
    for name, value in (("save_every", save_every), ("keep", keep), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an int >= 1, got {value!r}")
    if params.dtype == jnp.float16:
        raise ValueError("gradients vanish in float16: load the model in bfloat16 or float32")
    student, guide = params.weights(), (params if teacher is None else teacher).weights()
    if rope_base is not None:
        student = _with_rope(student, rope_base, max(length, params.config.max_positions))
    check_length(length, 2, student.config.max_positions)
    if training.distill and length > guide.config.max_positions:
        raise ValueError(
            f"length={length} is more than the {guide.config.max_positions} positions of the model "
            "whose predictions are learnt: give a teacher that has so many, or distill=0"
        )
    student = _student(student, policy)
    batches = Batches(params, texts, length=length, batch=batch, seed=seed)
    about = {
        "model": params.name,
        **{
            field.name: repr(getattr(training, field.name))
            for field in dataclasses.fields(training)
        },
        "root": policy.sharing and policy.sharing.root,
        "length": length,
        "batch": batch,
        "seed": seed,
        "tokens_of_texts": batches.tokens,
        "rope_base": rope_base,
        "start": _digest(split(student, training)),
        "teacher": _digest(flatten(guide.state)) if training.distill else "none",
    }

    def named(model: Params) -> Params:
        return dataclasses.replace(model, name=params.name, tokenizer=params.tokenizer)

    run = _Training(Path(folder), training, student, guide, about, keep, mesh)
    start = run.resume(batches)
    for step in each(range(start, steps), "adapting", total=steps - start):
        run.step(step, [next(batches) for _ in range(training.accumulate)])
        if (step + 1) % save_every == 0 or step + 1 == steps:
            # Before it is saved: what is logged after a checkpoint is cut off and done again.
            if watch is not None:
                run.log({"step": step + 1, **watch(step + 1, named(run.model))})
            run.save(step + 1, batches)
    return named(run.finish())


def with_weights(params: Params, folder: str | os.PathLike[str]) -> Params:
    """A model with the weights that `adapt` left in a folder.

    Raises:
      ValueError: there are none, or they are of another model.

    """
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load_file

    file = Path(folder) / WEIGHTS
    if not file.is_file():
        raise ValueError(f"{os.fspath(folder)} holds no {WEIGHTS}: jaxkv.pod.adapt writes it")
    try:
        found = load_file(file)
        with safe_open(file, "numpy") as opened:
            about = opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if "rope_base" in about:
        params = _with_rope(params, float(about["rope_base"]), int(about["max_positions"]))
    if any(path.endswith(".far_map") for path in found):
        config = params.config
        eye = np.eye(config.head_dim, dtype=np.float32)
        params = with_maps(params, np.tile(eye, (config.num_layers, config.num_heads, 1, 1)))
    own = flatten(params.state)
    for path, array in found.items():
        if path not in own or own[path].shape != array.shape:
            raise ValueError(
                f"{file} has {path} of shape {array.shape}, and {params.name or 'the model'} "
                f"{'has none' if path not in own else own[path].shape}: it is of another model"
            )
    return joined(params, {name: jnp.asarray(array) for name, array in found.items()})


def _student(params: Params, policy: Policy) -> Params:
    """The model as training starts: with maps, if the policy shares keys."""
    policy.prepare(params)
    if not isinstance(policy, PoD) or params.config.far_maps:
        return params
    config = params.config
    maps = policy.plan.maps
    if maps is None:
        eye = np.eye(config.head_dim, dtype=np.float32)
        maps = np.tile(eye, (config.num_layers, config.num_heads, 1, 1))
    return with_maps(params, maps)


def _digest(arrays: Mapping[str, Any]) -> str:
    """What tells one set of weights from another, unless they lie on several hosts."""
    found = hashlib.sha256()
    for path, array in sorted(arrays.items()):
        if not array.is_fully_addressable:
            return _UNKNOWN
        found.update(f"{path} {array.dtype}".encode())
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()[:16]


def _with_rope(params: Params, base: float, max_positions: int) -> Params:
    """The model with another base of its rotary embedding, and so many positions."""
    config = params.config
    if config.rotary_embedding is None:
        raise ValueError(
            f"rope_base={base} is for models with rotary embeddings, and "
            f"{params.name or 'the model'} has none"
        )
    rotary = with_base(config.rotary_embedding, base)
    config = dataclasses.replace(config, rotary_embedding=rotary, max_positions=max_positions)
    return dataclasses.replace(params, config=config)


class _Training:
    """State, checkpoints and log of one training."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        student: Params,
        teacher: Params,
        about: Mapping[str, Any],
        keep: int,
        mesh: jax.sharding.Mesh | None,
    ):
        # Half a second to import, and only those who train need it.
        import orbax.checkpoint as ocp

        self.folder, self.recipe, self.mesh = folder.absolute(), recipe, mesh
        self.about = json.loads(json.dumps(about))
        self.student = placed(student, mesh)
        self.teacher = placed(teacher, mesh) if recipe.distill > 0 else None
        # Copies: updates give the trained weights away, and the teacher has the same ones. In
        # float32: in half precision weights would not move by what a rate such as 1e-5 makes.
        self.trained = jax.tree.map(
            lambda leaf: jnp.array(leaf, jnp.float32), split(self.student, recipe)
        )
        self.state = placed(jax.jit(recipe.optimizer().init)(self.trained), mesh)
        self.rate = recipe.rate()
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoints = self.folder / "checkpoints"
        # Before a checkpoint gets its final name: one that has it is sealed.
        sealed = ocp.AsyncOptions(
            post_finalization_callback=lambda: checkpoint.seal_new(checkpoints.glob("*/*"))
        )
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, async_options=sealed)
        self.manager = ocp.CheckpointManager(checkpoints, options=options)

    def step(self, step: int, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        """One update, of one or several batches."""
        start = time.perf_counter()
        told: list[dict[str, float]] = []
        for batch in batches:
            texts = self._placed(Texts(**{name: jnp.asarray(x) for name, x in batch.items()}))
            with on_mesh_of(self.trained):
                self.trained, self.state, found = update(
                    self.trained, self.state, self.student, self.teacher, texts, self.recipe
                )
            told.append({name: float(value) for name, value in found.items()})
        record = {name: float(np.mean([one[name] for one in told])) for name in told[0]}
        if not math.isfinite(record["loss"]):
            raise ValueError(
                f"the loss of update {step + 1} is {record['loss']}: lower learning_rate="
                f"{self.recipe.learning_rate}; the last checkpoint is update {self._latest()}"
            )
        record["predicted"] *= len(told)
        record |= {
            "step": step + 1,
            "learning_rate": float(self.rate(step)),
            "seconds": round(time.perf_counter() - start, 3),
        }
        self.log(record)

    def log(self, record: Mapping[str, float]) -> None:
        """Adds a line to the log."""
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    @property
    def model(self) -> Params:
        """The model as it is now; a copy, since updates give the weights away."""
        return joined(self.student, jax.tree.map(jnp.copy, self.trained))

    def _latest(self) -> int:
        return self.manager.latest_step() or 0

    def _placed(self, texts: Texts) -> Texts:
        if self.mesh is None:
            return texts
        spec = jax.sharding.PartitionSpec("data", "sequence")
        return jax.device_put(texts, jax.sharding.NamedSharding(self.mesh, spec))

    def save(self, step: int, batches: Batches) -> None:
        """Writes a checkpoint while training goes on."""
        import orbax.checkpoint as ocp

        # A copy, since it is written while the next updates give the arrays away.
        state = jax.tree.map(jnp.copy, self._arrays())
        told = {"about": self.about, "data": _plain(batches.state)}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), told=ocp.args.JsonSave(told))
        self.manager.save(step, args=args)

    def _arrays(self) -> dict[str, Any]:
        leaves = jax.tree.leaves(self.state)
        return {"trained": self.trained, "state": {str(i): x for i, x in enumerate(leaves)}}

    def resume(self, batches: Batches) -> int:
        """Goes to the last checkpoint that can be read; gives the updates that are done."""
        import orbax.checkpoint as ocp

        def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                for item in ("state", "told"):
                    checkpoint.check(self.manager.directory / str(step) / item)
            except ValueError as error:
                warnings.warn(f"{error}; passed over", stacklevel=3)
                self.manager.delete(step)
                continue
            told = self._restored(step, told=ocp.args.JsonRestore())
            # Arrays of another training may have other shapes.
            self._compare(told["about"])
            wanted = jax.tree.map(abstract, self._arrays())
            state = self._restored(step, state=ocp.args.StandardRestore(wanted))
            self.trained = state["trained"]
            leaves = [state["state"][str(i)] for i in range(len(state["state"]))]
            self.state = jax.tree.unflatten(jax.tree.structure(self.state), leaves)
            batches.state = told["data"]
            self._cut_log(step)
            return step
        self._cut_log(0)
        return 0

    def _restored(self, step: int, **item: Any) -> Any:
        """An item of a checkpoint."""
        import orbax.checkpoint as ocp

        (name,) = item
        return self.manager.restore(step, args=ocp.args.Composite(**item))[name]

    def _compare(self, about: Mapping[str, Any]) -> None:
        """Raises `ValueError` if a checkpoint is of another training."""
        apart = [
            f"{name} is {about.get(name)!r} there and {value!r} here"
            for name, value in self.about.items()
            if about.get(name) != value and _UNKNOWN not in (about.get(name), value)
        ]
        if apart:
            told = "; ".join(f"{difference:.200}" for difference in apart)
            raise ValueError(
                f"{self.folder} holds another training ({told}): choose another folder"
            )

    def _cut_log(self, step: int) -> None:
        """Drops what was logged after a checkpoint: it will be done again."""
        log = self.folder / LOG
        kept = [line for line in _lines(log) if json.loads(line)["step"] <= step]
        log.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def finish(self) -> Params:
        """Writes the weights and the loss curve; gives the trained model."""
        from safetensors.numpy import save_file

        self.manager.wait_until_finished()
        self.manager.close()
        arrays = {name: np.ascontiguousarray(array) for name, array in self.trained.items()}
        about = {}
        if self.about["rope_base"] is not None:
            about["rope_base"] = repr(self.about["rope_base"])
            about["max_positions"] = str(self.student.config.max_positions)
        save_file(arrays, self.folder / WEIGHTS, metadata=about)
        draw_curve(self.folder)
        return self.model


def draw_curve(folder: str | os.PathLike[str]) -> bool:
    """Draws `loss.png` from the log of a training; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = [json.loads(line) for line in _lines(Path(folder) / LOG)]
    records = [record for record in records if "loss" in record]
    if not records:
        return False
    tokens = np.cumsum([record["predicted"] for record in records])
    curves = {n: [record[n] for record in records] for n in ("cross_entropy", "divergence")}
    curves = {name: values for name, values in curves.items() if any(values)}
    figure = Figure((6, 1 + 2 * len(curves)), layout="constrained")
    for number, (name, values) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(len(curves), 1, number)
        width = max(1, len(values) // 10)
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        (line,) = axes.plot(tokens, values, lw=0.5, alpha=0.4)
        axes.plot(tokens[width - 1 :], smooth, color=line.get_color())
        axes.set_ylabel(f"{name.replace('_', ' ')}\n(nats per token)")
        axes.set_ylim(bottom=0 if name == "divergence" else None)
    axes.set_xlabel("tokens")
    figure.savefig(Path(folder) / "loss.png", dpi=120)
    return True


def _lines(file: Path) -> Iterator[str]:
    """Whole lines of a log; the last may have been cut off by a kill."""
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield line.strip()


def _plain(state: Any) -> Any:
    """The state of a pipeline as JSON, whatever numbers it has."""
    return json.loads(json.dumps(state, default=int))
