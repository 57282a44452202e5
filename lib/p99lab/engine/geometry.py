"""The shape of a model: read from a Hugging Face `config.json` or from `params/models/<name>.yaml`. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from p99lab import project
from p99lab.errors import ModelError, did_you_mean
from p99lab.strict import StrictModel

Config = dict[str, Any]  # a parsed config.json

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "llama3", "yarn")
DEFAULT_ROPE_THETA = 10_000.0  # of all four architectures, where the file is silent


class Rope(StrictModel):
    """Rotary position embedding: `default`, `llama3` (Llama 3.1's frequency bands) or `yarn` (arXiv 2309.00071).

    Fields as transformers names them. `factor`, `original_max_position_embeddings` and the two frequency factors are
    required by the types that use them.
    """

    type: Literal["default", "llama3", "yarn"] = "default"
    theta: float = Field(default=DEFAULT_ROPE_THETA, gt=0)
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed = {
            "default": (),
            "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }[self.type]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"rope type '{self.type}' needs {', '.join(missing)}")
        return self


class Geometry(StrictModel):
    """Everything about a model but its weights. Sizes are in elements.

    `attention_bias` is on q, k and v, `output_bias` on the attention's output projection, `mlp_bias` on gate, up and
    down. `qk_norm`: RMSNorm over the head dimension of q and k, before the rotation (Qwen3).
    """

    architecture: Literal["llama", "mistral", "qwen2", "qwen3"]
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_q_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    intermediate_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    rope: Rope = Rope()
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_q_heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        return self

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of K alone, which is also that of V."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; tied embeddings count once."""
        hidden, qkv_size = self.hidden_size, self.q_size + 2 * self.kv_size
        attention = hidden * qkv_size + self.q_size * hidden
        biases = qkv_size * self.attention_bias + hidden * self.output_bias
        mlp = 3 * hidden * self.intermediate_size + (2 * self.intermediate_size + hidden) * self.mlp_bias
        norms = 2 * hidden + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + biases + mlp + norms) + embeddings + hidden

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Bytes of K and V of one token over all layers; an element of bf16 or fp16 has 2, of fp32 4."""
        return 2 * self.num_layers * self.kv_size * bytes_per_element

    @classmethod
    def named(cls, name: str) -> Self:
        """The geometry of `params/models/<name>.yaml`.

        Raises:
            ModelError: there is none of that name, or the file does not hold one.
        """
        path = project.params_dir() / "models" / f"{name}.yaml"
        if name not in known_geometries():
            known = ", ".join(known_geometries())
            raise ModelError(f"no geometry '{name}'{did_you_mean(name, known_geometries())} (known: {known})")
        return cls._build(yaml.safe_load(path.read_text()), str(path))

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """The geometry of a Hugging Face directory: `config.json`, and `generation_config.json`'s end tokens over it.

        Raises:
            ModelError: no readable config.json, or something in it that this engine does not compute.
        """
        config = _read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        if generation.is_file():
            eos = _read_json(generation).get("eos_token_id")
            config["eos_token_id"] = config.get("eos_token_id") if eos is None else eos
        return cls.from_config(config, str(directory / "config.json"))

    @classmethod
    def from_config(cls, config: Config, source: str = "config.json") -> Self:
        """The geometry of a parsed config.json, as transformers 4 or 5 writes it; `source` is for the messages."""
        architecture = _architecture(config, source)
        _refuse_what_is_not_computed(config, architecture, source)
        num_q_heads = _required(config, "num_attention_heads", source)
        bias = bool(config.get("attention_bias", False)) and architecture in ("llama", "qwen3")
        eos = config.get("eos_token_id")
        values = {
            "architecture": architecture,
            "num_layers": _required(config, "num_hidden_layers", source),
            "hidden_size": _required(config, "hidden_size", source),
            "num_q_heads": num_q_heads,
            "num_kv_heads": config.get("num_key_value_heads") or num_q_heads,
            "head_dim": _head_dim(config, architecture, num_q_heads),
            "intermediate_size": _required(config, "intermediate_size", source),
            "vocab_size": _required(config, "vocab_size", source),
            "max_position_embeddings": _required(config, "max_position_embeddings", source),
            "rope": _rope(config, source),
            "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "attention_bias": bias or architecture == "qwen2",
            "output_bias": bias,
            "mlp_bias": bool(config.get("mlp_bias", False)) and architecture == "llama",
            "qk_norm": architecture == "qwen3",
            "bos_token_id": config.get("bos_token_id"),
            "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        }
        return cls._build(values, source)

    @classmethod
    def _build(cls, values: Any, source: str) -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ModelError(f"{source}: {cls.explain(error)}") from None


def known_geometries() -> list[str]:
    """Names for `Geometry.named` and `dummy:<name>`, sorted."""
    return sorted(path.stem for path in (project.params_dir() / "models").glob("*.yaml"))


def _read_json(path: Path) -> Config:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({_reason(error)})") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected an object, found a {type(content).__name__}")
    return content


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"not JSON: {error}"


def _required(config: Config, key: str, source: str) -> Any:
    if config.get(key) is None:
        raise ModelError(f"{source}: '{key}' is missing")
    return config[key]


def _architecture(config: Config, source: str) -> str:
    by_type = {family: name for name, family in ARCHITECTURES.items()}
    found = (config.get("architectures") or [by_type.get(config.get("model_type", ""), config.get("model_type"))])[0]
    if found not in ARCHITECTURES:
        raise _unsupported(source, "architecture", found, ", ".join(ARCHITECTURES))
    return ARCHITECTURES[found]


def _refuse_what_is_not_computed(config: Config, architecture: str, source: str) -> None:
    experts = next((key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None)
    if experts:
        raise _unsupported(source, experts, config[experts], "dense layers")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _unsupported(source, "hidden_act", config["hidden_act"], "silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise _unsupported(source, "quantization", method, "weights in fp32, bf16 or fp16")
    window = _active_window(config, architecture)
    if window is not None:
        raise _unsupported(source, "sliding_window", window, "full attention")


def _active_window(config: Config, architecture: str) -> int | None:
    """The sliding window, if any layer really attends through one that is shorter than the model's context.

    Mistral's is on unless null (transformers assumes 4 096 where the key is absent). Qwen's is off unless
    `use_sliding_window`, and then covers the layers from `max_window_layers` on, or those that `layer_types` names.
    """
    if architecture == "llama":
        return None
    window = config.get("sliding_window", 4096)
    if window is None or window >= config.get("max_position_embeddings", 0):
        return None
    if architecture == "mistral":
        return int(window)
    layer_types = config.get("layer_types")
    if layer_types is None:
        windowed = config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0)
    else:
        windowed = any(kind != "full_attention" for kind in layer_types)
    return int(window) if config.get("use_sliding_window", False) and windowed else None


def _head_dim(config: Config, architecture: str, num_q_heads: int) -> int:
    if config.get("head_dim") is not None:
        return int(config["head_dim"])
    return 128 if architecture == "qwen3" else int(config["hidden_size"]) // num_q_heads


def _rope(config: Config, source: str) -> Config:
    """Rope's fields out of `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise _unsupported(source, "rope per layer type", ", ".join(given), "one rope for all layers")
    partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise _unsupported(source, "partial_rotary_factor", partial, "1.0")
    legacy_type = given.pop("type", None)
    rope_type = given.pop("rope_type", None) or legacy_type or "default"
    if rope_type not in ROPE_TYPES:
        raise _unsupported(source, "rope type", rope_type, ", ".join(ROPE_TYPES))
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_ROPE_THETA
    rope = {"type": rope_type, "theta": theta} | {key: value for key, value in given.items() if value is not None}
    if rope_type != "default":
        _complete_scaling(rope, config)
    return rope


def _complete_scaling(rope: Config, config: Config) -> None:
    """What transformers derives where the file is silent: the trained length, and yarn's factor from it."""
    trained = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    rope["original_max_position_embeddings"] = trained or config["max_position_embeddings"]
    if rope["type"] == "yarn":
        rope.setdefault("factor", config["max_position_embeddings"] / rope["original_max_position_embeddings"])


def _unsupported(source: str, what: str, found: Any, supported: str) -> ModelError:
    return ModelError(f"{source}: {what} '{found}' is not supported (supported: {supported})")
