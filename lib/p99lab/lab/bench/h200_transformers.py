"""transformers on the sizes of `p99lab bench h200`, in a process of its own, because it needs the device's memory.

Executed as a module it *is* that process: sizes as JSON in its arguments, seconds as JSON on its standard output.
Random weights of the same geometry, SDPA attention, a DynamicCache. The prompt is computed in one forward pass: in
chunks, SDPA would be given a mask of every pair, and leave its fast kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from p99lab.engine.geometry import Geometry
from p99lab.engine.model_store import check
from p99lab.errors import P99labError
from p99lab.lab.bench.h200_sizes import H200Bench
from p99lab.serving import child

MODULE = "p99lab.lab.bench.h200_transformers"
TIMEOUT_S = 240.0


class TransformersError(P99labError):
    """transformers could not be measured: one line that says why."""


@dataclass(frozen=True, slots=True)
class TransformersTimes:
    """Seconds of a cold prompt of the whole context, and of each decode step behind it."""

    prefill_s: float
    steps_s: tuple[float, ...]


def measure(bench: H200Bench) -> TransformersTimes:
    """Run the process to its end.

    Raises:
        TransformersError: it failed, or took longer than `TIMEOUT_S`.
    """
    command = child.command(MODULE, [bench.model_dump_json()])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TransformersError(f"transformers did not end within {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise TransformersError(f"transformers failed: {(lines or ['it gave no reason'])[-1]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return TransformersTimes(told["prefill_s"], tuple(told["steps_s"]))


def config_values(geometry: Geometry) -> dict[str, Any]:
    """A geometry as transformers' Llama configuration has it."""
    rope = geometry.rope.model_dump(exclude_none=True)
    names = {"type": "rope_type", "theta": "rope_theta"}
    return {
        "hidden_size": geometry.hidden_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_q_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "intermediate_size": geometry.intermediate_size,
        "vocab_size": geometry.vocab_size,
        "max_position_embeddings": geometry.max_position_embeddings,
        "rms_norm_eps": geometry.rms_norm_eps,
        "rope_parameters": {names.get(name, name): value for name, value in rope.items()},
        "tie_word_embeddings": geometry.tie_word_embeddings,
    }


def run(bench: H200Bench) -> TransformersTimes:
    """Measure in this process."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    dtype = getattr(torch, bench.dtype)
    torch.manual_seed(bench.seed)
    with torch.device(bench.device), torch.inference_mode():
        config = LlamaConfig(**config_values(check(bench.model)))
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=dtype, attn_implementation="sdpa").eval()
        rng = np.random.default_rng(bench.seed)
        num_tokens = bench.context_len - bench.num_transformers_steps - 1
        prompt = torch.from_numpy(rng.integers(0, bench.vocab_size, num_tokens)).to(bench.device)[None]
        wait = torch.cuda.synchronize if bench.device.startswith("cuda") else _nothing
        _forward(model, prompt, None, wait)  # the first chooses kernels and takes its memory from the device
        prefill_s, token, cache = _forward(model, prompt, None, wait)
        steps_s = []
        for _ in range(bench.num_transformers_steps):
            step_s, token, cache = _forward(model, token, cache, wait)
            steps_s.append(step_s)
    return TransformersTimes(prefill_s, tuple(steps_s))


def _forward(model: Any, ids: Any, cache: Any, wait: Callable[[], None]) -> tuple[float, Any, Any]:
    """Seconds until the next token is known, that token [1, 1], and the cache."""
    began_s = time.perf_counter()
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1:].argmax(-1)
    wait()
    return time.perf_counter() - began_s, token, out.past_key_values


def _nothing() -> None:
    pass


def _main() -> None:
    times = run(H200Bench.parse(json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps({"prefill_s": times.prefill_s, "steps_s": times.steps_s}) + "\n")


if __name__ == "__main__":
    _main()
