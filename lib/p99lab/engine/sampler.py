"""From logits to tokens.

The random number a request uses depends on its seed and position alone; its logits may differ in the last bits with the
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from p99lab.engine.plan import Logprobs, Row
from p99lab.engine.request import SamplingParams

MIN_TEMPERATURE = 1e-6  # logits divided by less overflow


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of R positions, on the device or, from `to_host` on, on their way to the host."""

    chosen: torch.Tensor  # [R]
    values: torch.Tensor  # [R, num_top]
    token_ids: torch.Tensor  # [R, num_top]

    def to_host(self) -> Scores:
        """A copy that the host does not wait for: to be read once the stream has come past this point."""
        return Scores(*(tensor.to("cpu", non_blocking=True) for tensor in (self.chosen, self.values, self.token_ids)))

    def as_logprobs(self) -> list[Logprobs]:
        columns = (self.chosen.tolist(), self.token_ids.tolist(), self.values.tolist())
        return [Logprobs(own, tuple(zip(ids, values, strict=True))) for own, ids, values in zip(*columns, strict=True)]


def choose(logits: torch.Tensor, rows: Sequence[Row], default_seed: int) -> torch.Tensor:
    """Choose one token for each row, [R] int64, without waiting for the device.

    Args:
        logits: [R, vocab] float32; left as it is.
        rows: the R rows that sample, in the order of `logits`.
        default_seed: mixed with a request's number where the request brings no seed.
    """
    chosen = logits.argmax(-1)
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0.0]
    if random:
        index = _on_device(np.array(random), logits.device)
        chosen[index] = _draw(logits[index], [rows[i] for i in random], default_seed)
    return chosen


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Scores:
    """The model's log-probabilities of given tokens, and of the `num_top` most probable ones beside each.

    They are the model's own, before temperature and truncation, as the OpenAI API has them.

    Args:
        logits: [R, vocab] float32; left as it is.
        token_ids: [R] int64.
    """
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(num_top)
    return Scores(logprobs.gather(-1, token_ids[:, None])[:, 0], values, ids)


def score_rows(logits: torch.Tensor, rows: Sequence[Row], chosen: torch.Tensor) -> dict[int, Scores]:
    """`score` of what was chosen, one row each, for the rows that ask for it."""
    return {
        i: score(logits[i : i + 1], chosen[i : i + 1], row.sampling.logprobs)
        for i, row in enumerate(rows)
        if row.sampling.logprobs is not None
    }


def _draw(logits: torch.Tensor, rows: Sequence[Row], default_seed: int) -> torch.Tensor:
    """Invert the truncated, tempered distribution at one uniform number a row. Returns [R] int64."""
    column = _columns([row.sampling for row in rows], logits.device)
    ordered, token_ids = (logits / column["temperature"]).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    probs = ordered.masked_fill_(rank >= column["top_k"], -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the more probable tokens
    keep = (probs > 0.0) & (before < column["top_p"]) & (probs >= column["min_p"] * probs[:, :1])
    keep[:, 0] = True
    cumulative = (probs * keep).cumsum(-1)
    uniform = _on_device(np.array([[_uniform(row, default_seed)] for row in rows], np.float32), logits.device)
    rank_drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    last_kept = keep.sum(-1, keepdim=True) - 1  # kept tokens are a prefix of the order
    return token_ids.gather(-1, torch.minimum(rank_drawn, last_kept))[:, 0]


def _columns(params: Sequence[SamplingParams], device: torch.device) -> dict[str, torch.Tensor]:
    """Each parameter as a [R, 1] column; no top-k reads as one larger than any vocabulary."""
    values = {
        "temperature": [max(p.temperature, MIN_TEMPERATURE) for p in params],
        "top_k": [p.top_k or 2**31 for p in params],
        "top_p": [p.top_p for p in params],
        "min_p": [p.min_p for p in params],
    }
    return {name: _on_device(np.array(column), device)[:, None] for name, column in values.items()}


def _on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy that nobody waits for."""
    tensor = torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _uniform(row: Row, default_seed: int) -> float:
    """A number in [0, 1) from a counter-based generator: the same for the same seed and position, wherever it runs."""
    seed = row.sampling.seed
    key = (seed % 2**64, 0) if seed is not None else (default_seed % 2**64, row.number + 1)
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=row.num_output_tokens)
    return float(np.random.Generator(generator).random(dtype=np.float32))
