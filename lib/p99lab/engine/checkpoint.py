"""Weights from safetensors files, or seeded random ones. Everything is checked before anything is allocated."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from p99lab.engine.geometry import Geometry
from p99lab.engine.weights import Weights
from p99lab.errors import ModelError

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
DUMMY_STD = 0.02
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_LENGTH_BYTES = 8  # little-endian, before the header itself
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a safetensors header."""

    shard: Path
    dtype: str
    shape: Shape


def load_weights(directory: Path, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read a Hugging Face directory's safetensors, single or sharded, into fused tensors of `dtype` on `device`.

    Headers of all shards are checked against `geometry` first (names, shapes, dtypes, file sizes).

    Raises:
        ModelError: a shard missing, truncated or unreadable; a tensor missing, unexpected, of the wrong shape or of a
            dtype other than fp32, bf16, fp16. Nothing stays allocated.
    """
    stored = read_headers(directory)
    check_against(geometry, stored)
    weights = Weights.allocate(geometry, dtype, device)
    targets = dict(weights.by_name())
    for shard in sorted({stored[name].shard for name in targets}):
        try:
            with safe_open(shard, framework="pt", device=str(device)) as file:  # from the file's pages to the device
                for name in (name for name in targets if stored[name].shard == shard):
                    targets[name].copy_(file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{shard}: cannot be read ({error})") from None
    return weights


def dummy_weights(geometry: Geometry, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Random weights, built on the device: normal with standard deviation 0.02, norms 1.

    Each tensor has a generator of its own, seeded by `seed` and the tensor's name, so neither order nor fusion matters.
    """
    weights = Weights.allocate(geometry, dtype, device)
    generator = torch.Generator(device)
    for name, tensor in weights.by_name():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest) >> 1)
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
    return weights


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory's safetensors, from headers alone.

    Raises:
        ModelError: see `load_weights`.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory")
    if (directory / INDEX_FILE).is_file():
        return _read_sharded(directory)
    if not (directory / SINGLE_FILE).is_file():
        others = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".gguf", ".safetensors"))
        found = f"found {', '.join(others)}" if others else "found no weights"
        raise ModelError(f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}, {found}")
    return _read_header(directory / SINGLE_FILE)


def check_against(geometry: Geometry, stored: dict[str, StoredTensor]) -> None:
    """Names, shapes and dtypes of `stored` against what a model of this geometry has.

    Raises:
        ModelError: the first tensor at fault, with what was expected and what was found.
    """
    expected = {
        name: tuple(tensor.shape) for name, tensor in Weights.allocate(geometry, torch.float32, "meta").by_name()
    }
    for name, shape in expected.items():
        found = stored.get(name)
        if found is None:
            raise ModelError(f"tensor '{name}' is missing: expected {_format(shape)}, found none")
        if found.shape != shape:
            raise _mismatch(found.shard, name, _format(shape), _format(found.shape))
        if found.dtype not in DTYPE_BYTES:
            raise _mismatch(found.shard, name, f"one of {', '.join(DTYPE_BYTES)}", found.dtype)
    for name in _unexpected(geometry, stored.keys() - expected.keys()):
        raise _mismatch(stored[name].shard, name, "no such tensor", _format(stored[name].shape))


def _unexpected(geometry: Geometry, names: Iterable[str]) -> list[str]:
    """Tensors that must not be ignored. Rope tables and a tied head may be: they are derived from the rest."""
    tied = {"lm_head.weight"} if geometry.tie_word_embeddings else set()
    return sorted(name for name in names if not name.endswith("rotary_emb.inv_freq") and name not in tied)


def _read_sharded(directory: Path) -> dict[str, StoredTensor]:
    weight_map = _weight_map(directory / INDEX_FILE)
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            raise ModelError(f"{directory}: shard '{shard}' of {INDEX_FILE} is missing")
        stored |= _read_header(directory / shard)
    for name, shard in weight_map.items():
        found = stored.get(name)
        if found is None or found.shard.name != shard:
            where = "no shard" if found is None else found.shard.name
            raise ModelError(f"{directory}: tensor '{name}' expected in shard {shard}, found in {where}")
    return stored


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        plain = {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: expected an object with a 'weight_map', found none ({error!r})") from None
    outside = next((shard for shard in plain.values() if Path(shard).name != shard), None)
    if outside is not None:
        raise ModelError(f"{index}: shard '{outside}' expected beside the index, found a path")
    return plain


def _read_header(shard: Path) -> dict[str, StoredTensor]:
    """A shard's tensors, once its size is what its header promises."""
    try:
        with shard.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(HEADER_LENGTH_BYTES))
            header = json.loads(file.read(min(header_bytes, MAX_HEADER_BYTES)))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        stored = {name: _entry(shard, name, entry) for name, entry in entries.items()}
        data_bytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except OSError as error:
        raise ModelError(f"{shard}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error):
        raise ModelError(f"{shard}: cannot be read (its header is not that of a safetensors file)") from None
    expected, found = HEADER_LENGTH_BYTES + header_bytes + data_bytes, shard.stat().st_size
    if found != expected:
        raise ModelError(f"{shard}: truncated or damaged, expected {expected} bytes, found {found}")
    return stored


def _entry(shard: Path, name: str, entry: dict[str, Any]) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    first, last = entry["data_offsets"]
    expected = math.prod(shape) * DTYPE_BYTES.get(entry["dtype"], 0)
    if expected and last - first != expected:
        raise _mismatch(shard, name, f"{expected} bytes of data", f"{last - first}")
    return StoredTensor(shard, str(entry["dtype"]), shape)


def _mismatch(shard: Path, name: str, expected: str, found: str) -> ModelError:
    return ModelError(f"{shard}: tensor '{name}' expected {expected}, found {found}")


def _format(shape: Shape) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
