import json
from pathlib import Path
from typing import Any

import pytest

from p99lab.engine.geometry import Geometry, known_geometries
from p99lab.errors import ModelError

pytestmark = pytest.mark.light

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
}


def family(name: str, **changes: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{name}ForCausalLM"]} | changes


@pytest.mark.parametrize(
    ("name", "num_parameters", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("llama-3.2-1b", 1_235_814_400, 32_768),
        ("llama-2-7b", 6_738_415_616, 524_288),
        ("qwen2.5-0.5b", 494_032_768, 12_288),
        ("smollm2-135m", 134_515_008, 23_040),
    ],
)
def test_known_geometries_have_the_published_sizes(name: str, num_parameters: int, kv_bytes: int) -> None:
    geometry = Geometry.named(name)
    assert geometry.num_parameters == num_parameters
    assert geometry.kv_bytes_per_token() == kv_bytes
    assert geometry.kv_bytes_per_token(4) == 2 * kv_bytes


def test_geometry_round_trips_through_a_dict() -> None:
    for name in known_geometries():
        geometry = Geometry.named(name)
        assert Geometry.parse(geometry.model_dump()) == geometry


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no geometry 'llama-3.1-8B'; did you mean 'llama-3.1-8b'\?"):
        Geometry.named("llama-3.1-8B")


def test_families_differ_in_biases_and_qk_norm() -> None:
    llama = Geometry.from_config(family("Llama", attention_bias=True))
    assert (llama.attention_bias, llama.output_bias, llama.qk_norm) == (True, True, False)
    qwen2 = Geometry.from_config(family("Qwen2"))
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = Geometry.from_config(family("Qwen3"))
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen3.head_dim == 128
    assert Geometry.from_config(family("Mistral", sliding_window=None, head_dim=32)).head_dim == 32


def test_model_type_stands_in_for_missing_architectures() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert Geometry.from_config(config | {"model_type": "llama"}).architecture == "llama"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "rope_keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_rope_reads_the_same_from_both_generations_of_config(rope_keys: dict[str, Any]) -> None:
    rope = Geometry.from_config(LLAMA | rope_keys).rope
    assert rope.type == "llama3"
    assert rope.theta == 5e5
    assert rope.original_max_position_embeddings == 1024


def test_yarn_derives_what_the_file_leaves_out() -> None:
    by_factor = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert Geometry.from_config(LLAMA | {"rope_scaling": by_factor}).rope.factor == 4.0
    by_length = {"rope_type": "yarn", "original_max_position_embeddings": 2048}
    assert Geometry.from_config(LLAMA | {"rope_parameters": by_length}).rope.factor == 2.0


@pytest.mark.parametrize(
    ("name", "keys", "active"),
    [
        ("Mistral", {}, True),  # transformers assumes 4096 where the key is absent
        ("Mistral", {"sliding_window": 1024}, True),
        ("Mistral", {"sliding_window": None}, False),
        ("Mistral", {"sliding_window": 8192}, False),  # longer than the context: never cuts
        ("Qwen2", {"sliding_window": 1024}, False),
        ("Qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 2}, False),
        ("Qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 1}, True),
        ("Qwen3", {"sliding_window": 1024, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, False),
        (
            "Qwen3",
            {
                "sliding_window": 1024,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            True,
        ),
    ],
)
def test_a_sliding_window_is_refused_only_where_it_cuts(name: str, keys: dict[str, Any], active: bool) -> None:
    config = family(name, **keys)
    if name == "Mistral" and not keys:
        config["max_position_embeddings"] = 32_768
    if active:
        with pytest.raises(ModelError, match=r"sliding_window '\d+' is not supported"):
            Geometry.from_config(config)
    else:
        Geometry.from_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, r"architecture 'MixtralForCausalLM' .*LlamaForCausalLM"),
        ({"num_local_experts": 8}, "num_local_experts '8' is not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported \(supported: silu\)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope type 'dynamic' .*default, llama3, yarn"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope per layer type 'full_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor '0.5'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq'"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key heads evenly"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        Geometry.from_config(LLAMA | change)
    assert "\n" not in str(refused.value)


def test_directory_takes_end_tokens_from_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert Geometry.from_directory(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert Geometry.from_directory(tmp_path).eos_token_ids == (0, 7)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_config_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json") as refused:
        Geometry.from_directory(tmp_path)
    assert "\n" not in str(refused.value)
