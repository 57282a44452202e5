from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from p99lab.engine import linear
from p99lab.engine.checkpoint import dummy_weights, load_weights
from p99lab.engine.geometry import Geometry
from p99lab.engine.model import LlamaModel
from p99lab.engine.rope import HeadNorms, prepared

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, one key head": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, biases, multi-head": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral, wide heads": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral, yarn": ("Mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn with its own scale": (
        "Qwen2",
        {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": False}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, biases, tied": ("Qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
}


class DenseAttention:
    """One sequence, all keys in a list per layer: as plain as it gets."""

    def __init__(self, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, heads: torch.Tensor, table: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        q, k, v = prepared(heads, self._num_kv_heads, table, norms)
        self._keys[layer] = k = torch.cat([self._keys.get(layer, k[:0]), k])
        self._values[layer] = v = torch.cat([self._values.get(layer, v[:0]), v])
        first = len(k) - len(q)
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(first)
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)


def build(name: str, changes: dict[str, Any], directory: Path, **saving: Any) -> torch.nn.Module:
    """A random transformers model, saved to `directory`; norms and biases random too."""
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            assert torch.isfinite(parameter).all(), parameter_name
    model.save_pretrained(directory, **saving)  # type: ignore[operator]
    return model


def open_model(directory: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return LlamaModel(load_weights(directory, Geometry.from_directory(directory), dtype, CPU))


@torch.inference_mode()
def logits_of(model: LlamaModel, token_ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """[T, vocab] of a sequence computed in chunks."""
    attention = DenseAttention(model.geometry.num_kv_heads)
    positions = torch.arange(len(token_ids))
    steps = zip(token_ids.split(chunks), positions.split(chunks), strict=True)
    return torch.cat([model.logits(model.forward(ids, at, attention)) for ids, at in steps])


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    sharding = {"max_shard_size": "60KB"} if "tied" in case else {}
    reference = build(*CASES[case], tmp_path, **sharding)
    assert bool(sharding) == (tmp_path / "model.safetensors.index.json").exists()
    token_ids = torch.randint(0, 128, (200,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
    model = open_model(tmp_path)
    for chunks in ([200], [37, 160, 1, 1, 1]):
        torch.testing.assert_close(logits_of(model, token_ids, chunks), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama, biases, multi-head", "qwen3, biases, tied"])
def test_packed_and_plain_products_agree(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(*CASES[case], tmp_path)
    token_ids = torch.arange(40)
    packed = logits_of(open_model(tmp_path), token_ids, [38, 1, 1])
    monkeypatch.setattr(linear, "MAX_PACKED_BYTES", 0)
    plain = logits_of(open_model(tmp_path), token_ids, [38, 1, 1])
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype: torch.dtype, tmp_path: Path) -> None:
    build("Llama", {"initializer_range": 0.05}, tmp_path)
    token_ids = torch.arange(60)
    exact = logits_of(open_model(tmp_path), token_ids, [60])
    half = logits_of(open_model(tmp_path, dtype), token_ids, [58, 1, 1])
    assert half.dtype == torch.float32
    assert (half - exact).norm() / exact.norm() < 0.03


def test_one_token_ids_of_either_width_and_odd_sizes() -> None:
    """Sizes that no slicing divides."""
    geometry = Geometry(
        architecture="llama",
        num_layers=1,
        hidden_size=21,
        num_q_heads=3,
        num_kv_heads=1,
        head_dim=6,
        intermediate_size=13,
        vocab_size=77,
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
    )
    model = LlamaModel(dummy_weights(geometry, torch.float32, CPU))
    whole = logits_of(model, torch.arange(9), [9])
    by_one = logits_of(model, torch.arange(9, dtype=torch.int32), [1] * 9)
    torch.testing.assert_close(whole, by_one, atol=1e-5, rtol=1e-4)


@pytest.mark.model
def test_smollm2_equals_transformers(smollm2_dir: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    text = Path(F.__file__).read_text()
    token_ids = torch.tensor(tokenizer(text[:4000])["input_ids"][:200])
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0].log_softmax(-1)
    found = logits_of(open_model(smollm2_dir), token_ids, [150, 48, 1, 1]).log_softmax(-1)
    assert expected.argmax(-1).tolist() == found.argmax(-1).tolist()
    likely = expected > -10  # further down the tail, fp32 itself is off by 1e-4 (both sides, measured against fp64)
    torch.testing.assert_close(found[likely], expected[likely], atol=1e-4, rtol=0)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)
