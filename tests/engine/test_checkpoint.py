import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from p99lab.engine.checkpoint import dummy_weights, load_weights
from p99lab.engine.geometry import Geometry
from p99lab.engine.weights import Weights
from p99lab.errors import ModelError

CPU = torch.device("cpu")
GEOMETRY = Geometry(
    architecture="qwen3",
    num_layers=2,
    hidden_size=32,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=96,
    max_position_embeddings=128,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
TIED = GEOMETRY.model_copy(update={"tie_word_embeddings": True})
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"

Tensors = dict[str, torch.Tensor]


def tensors_of(weights: Weights) -> Tensors:
    return {name: tensor.clone() for name, tensor in weights.by_name()}


@pytest.fixture
def tensors() -> Tensors:
    return tensors_of(dummy_weights(GEOMETRY, torch.float32, CPU, seed=1))


def save_sharded(tensors: Tensors, directory: Path) -> None:
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[number::3]}
        save_file(part, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(directory: Path, geometry: Geometry = GEOMETRY, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(directory, geometry, dtype, CPU)


@pytest.mark.parametrize("save", [lambda t, d: save_file(t, d / "model.safetensors"), save_sharded])
def test_what_was_saved_is_loaded(tensors: Tensors, tmp_path: Path, save: Callable[[Tensors, Path], None]) -> None:
    save(tensors, tmp_path)
    loaded = tensors_of(load(tmp_path))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_loads_as_each(tensors: Tensors, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    save_file({name: tensor.to(stored) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    loaded = tensors_of(load(tmp_path, dtype=wanted))
    assert torch.equal(loaded[Q_PROJ], tensors[Q_PROJ].to(stored).to(wanted))


def test_every_byte_of_the_fused_tensors_has_a_name() -> None:
    for geometry in (GEOMETRY, TIED):
        weights = Weights.allocate(geometry, torch.float32, "meta")
        assert sum(tensor.numel() for _, tensor in weights.by_name()) == geometry.num_parameters


def test_derived_tensors_are_ignored(tensors: Tensors, tmp_path: Path) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path, TIED).lm_head.shape == (96, 32)  # lm_head.weight is there too


def test_dummy_weights_depend_on_seed_and_name_alone() -> None:
    one, again = (tensors_of(dummy_weights(GEOMETRY, torch.float32, CPU, seed=3)) for _ in range(2))
    other = tensors_of(dummy_weights(GEOMETRY, torch.float32, CPU, seed=4))
    tied = tensors_of(dummy_weights(TIED, torch.float32, CPU, seed=3))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one[Q_PROJ], other[Q_PROJ])
    assert not torch.equal(one[Q_PROJ], one[Q_PROJ.replace("1", "0")])
    assert torch.equal(one[Q_PROJ], tied[Q_PROJ])
    assert 0.015 < one[Q_PROJ].std() < 0.025


def expect_refusal(directory: Path, *parts: str) -> None:
    with pytest.raises(ModelError) as refused:
        load(directory)
    assert "\n" not in str(refused.value)
    for part in parts:
        assert part in str(refused.value)


def test_wrong_directories(tmp_path: Path) -> None:
    expect_refusal(tmp_path / "nowhere", "nowhere is not a directory")
    expect_refusal(tmp_path, "expected model.safetensors", "found no weights")
    (tmp_path / "pytorch_model.bin").touch()
    expect_refusal(tmp_path, "found pytorch_model.bin")


def test_missing_and_moved_shards(tensors: Tensors, tmp_path: Path) -> None:
    save_sharded(tensors, tmp_path)
    first, second, _ = sorted(tmp_path.glob("*.safetensors"))
    content = second.read_bytes()
    second.unlink()
    expect_refusal(tmp_path, f"shard '{second.name}'", "missing")
    second.write_bytes(first.read_bytes())
    expect_refusal(tmp_path, "expected in shard", second.name)
    second.write_bytes(content)
    load(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"x": "../elsewhere.safetensors"}}'])
def test_bad_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    expect_refusal(tmp_path, "model.safetensors.index.json", "expected")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_shard(tensors: Tensors, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:keep])
    expect_refusal(tmp_path, "model.safetensors")


@pytest.mark.parametrize("garbage", [b"not a header at all", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"\x00" * 8])
def test_garbage_shard(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(garbage)
    expect_refusal(tmp_path, "model.safetensors")


def test_tensor_missing_wrong_or_unexpected(tensors: Tensors, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if name != Q_PROJ}, path)
    expect_refusal(tmp_path, Q_PROJ, "expected [32, 32], found none")
    save_file(tensors | {Q_PROJ: torch.ones(32, 31)}, path)
    expect_refusal(tmp_path, Q_PROJ, "expected [32, 32], found [32, 31]")
    save_file(tensors | {Q_PROJ: torch.ones(32, 32, dtype=torch.int8)}, path)
    expect_refusal(tmp_path, Q_PROJ, "expected one of F32, BF16, F16, found I8")
    save_file(tensors | {"model.layers.2.mlp.up_proj.weight": torch.ones(2, 3)}, path)
    expect_refusal(tmp_path, "model.layers.2.mlp.up_proj.weight", "expected no such tensor, found [2, 3]")


def test_nothing_is_allocated_before_all_headers_are_checked(
    tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_sharded(tensors, tmp_path)
    last = max(tmp_path.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    allocated = []
    empty = torch.empty

    def record(*shape: object, device: object, **options: object) -> torch.Tensor:
        allocated.append(device)
        return empty(*shape, device=device, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", record)
    expect_refusal(tmp_path, "truncated")
    assert set(allocated) <= {"meta"}
