"""From logits to tokens.

The random number a request uses depends on its seed and position alone; its logits may differ in the last bits with the
batch. Which token it falls on depends on the order of the tokens: that of their ids, or from the most probable one on
where a request truncates the distribution.
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
    """Log-probabilities of R positions, on the device or, from `to_host` on, on their way to the host.

    One tensor, so that they are one copy: [R, 1 + 2 * num_top] float32, the log-probability of the token that stands
    there, those of the most probable ones, and the bits of these ones' ids as int32.
    """

    packed: torch.Tensor

    def to_host(self) -> Scores:
        """A copy that the host does not wait for: to be read once the stream has come past this point."""
        return Scores(self.packed.to("cpu", non_blocking=True))

    def as_logprobs(self) -> list[Logprobs]:
        num_top = self.packed.shape[1] // 2
        own, values = self.packed[:, 0].tolist(), self.packed[:, 1 : 1 + num_top].tolist()
        ids = self.packed[:, 1 + num_top :].contiguous().view(torch.int32).tolist()
        rows = zip(own, ids, values, strict=True)
        return [Logprobs(one, tuple(zip(some_ids, some, strict=True))) for one, some_ids, some in rows]


def choose(logits: torch.Tensor, rows: Sequence[Row], default_seed: int) -> torch.Tensor:
    """Choose one token for each row, [R] int64, without waiting for the device.

    Args:
        logits: [R, vocab] float32; left as it is.
        rows: the R rows that sample, in the order of `logits`.
        default_seed: mixed with a request's number where the request brings no seed.
    """
    chosen = logits.argmax(-1)
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0.0]
    for draw, some in (
        (_draw, [i for i in random if not _is_truncated(rows[i].sampling)]),
        (_draw_truncated, [i for i in random if _is_truncated(rows[i].sampling)]),
    ):
        if some:
            index = _on_device(np.array(some), logits.device)
            chosen[index] = draw(logits[index], [rows[i] for i in some], default_seed)
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
    return Scores(torch.cat((logprobs.gather(-1, token_ids[:, None]), values, ids.int().view(torch.float32)), 1))


def score_rows(logits: torch.Tensor, rows: Sequence[Row], chosen: torch.Tensor) -> list[tuple[list[int], Scores]]:
    """`score` of what was chosen for the rows that ask for it, all together that ask for the same `num_top`.

    Returns:
        Rows, by their places, and the scores of these.
    """
    by_num_top: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.sampling.logprobs is not None:
            by_num_top.setdefault(row.sampling.logprobs, []).append(i)
    scored = []
    for num_top, some in by_num_top.items():
        index = _on_device(np.array(some), logits.device)
        scored.append((some, score(logits[index], chosen[index], num_top)))
    return scored


def _is_truncated(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _draw(logits: torch.Tensor, rows: Sequence[Row], default_seed: int) -> torch.Tensor:
    """Invert the tempered distribution at one uniform number a row, tokens in the order of their ids: no sorting.

    Returns [R] int64.
    """
    temperature = _columns([row.sampling for row in rows], logits.device)["temperature"]
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, _uniforms(rows, default_seed, logits.device) * total, right=True)
    last = torch.searchsorted(cumulative, total)  # that has a probability
    return torch.minimum(drawn, last)[:, 0]


def _draw_truncated(logits: torch.Tensor, rows: Sequence[Row], default_seed: int) -> torch.Tensor:
    """Invert the truncated, tempered distribution at one uniform number a row, the most probable tokens first.

    Returns [R] int64.
    """
    column = _columns([row.sampling for row in rows], logits.device)
    ordered, token_ids = (logits / column["temperature"]).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    probs = ordered.masked_fill_(rank >= column["top_k"], -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the more probable tokens
    keep = (probs > 0.0) & (before < column["top_p"]) & (probs >= column["min_p"] * probs[:, :1])
    keep[:, 0] = True
    cumulative = (probs * keep).cumsum(-1)
    uniforms = _uniforms(rows, default_seed, logits.device)
    rank_drawn = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
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


def _uniforms(rows: Sequence[Row], default_seed: int, device: torch.device) -> torch.Tensor:
    """One number a row, [R, 1]."""
    return _on_device(np.array([[_uniform(row, default_seed)] for row in rows], np.float32), device)


def _uniform(row: Row, default_seed: int) -> float:
    """A number in [0, 1) from a counter-based generator: the same for the same seed and position, wherever it runs."""
    seed = row.sampling.seed
    key = (seed % 2**64, 0) if seed is not None else (default_seed % 2**64, row.number + 1)
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=row.num_output_tokens)
    return float(np.random.Generator(generator).random(dtype=np.float32))
