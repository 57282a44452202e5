"""Sampling: greedy, truncation, seeds, log-probabilities."""

from typing import Any

import numpy as np
import pytest
import torch

from p99lab.engine import sampler
from p99lab.engine.plan import Logprobs, Row
from p99lab.engine.request import SamplingParams
from p99lab.engine.sampler import choose, score_rows
from p99lab.errors import BadParameterError

VOCAB = 50


def _row(sampling: SamplingParams, number: int = 0, num_output_tokens: int = 0) -> Row:
    empty = np.zeros(1, np.int32)
    return Row(str(number), number, empty, 0, empty, True, sampling, num_output_tokens)


def _logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def _sample(logits: torch.Tensor, rows: list[Row], seed: int = 0) -> tuple[list[int], dict[int, Logprobs]]:
    """What is chosen for each row, and by row the log-probabilities of those that ask for them."""
    chosen = choose(logits, rows, seed)
    told: dict[int, Logprobs] = {}
    for places, scores in score_rows(logits, rows, chosen):
        told |= zip(places, scores.to_host().as_logprobs(), strict=True)
    return chosen.tolist(), told


def _frequencies(sampling: SamplingParams, logits: torch.Tensor, draws: int = 4000) -> np.ndarray:
    rows = [_row(sampling, num_output_tokens=i) for i in range(draws)]
    token_ids, _ = _sample(logits.expand(draws, -1), rows)
    return np.bincount(token_ids, minlength=VOCAB) / draws


def test_greedy_rows_take_the_largest_logit_beside_random_ones() -> None:
    logits = _logits(3)
    rows = [_row(SamplingParams()), _row(SamplingParams(temperature=1.0)), _row(SamplingParams())]
    token_ids, logprobs = _sample(logits, rows)
    assert token_ids[0] == int(logits[0].argmax())
    assert token_ids[2] == int(logits[2].argmax())
    assert logprobs == {}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    logits = _logits(1)
    expected = (logits[0] / temperature).softmax(-1).numpy()
    frequencies = _frequencies(SamplingParams(temperature=temperature), logits)
    assert np.abs(frequencies - expected).max() < 5 * np.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (SamplingParams(temperature=1.0, top_k=3), lambda p: p >= np.sort(p)[-3]),
        (SamplingParams(temperature=1.0, top_p=0.6), lambda p: _nucleus(p, 0.6)),
        (SamplingParams(temperature=1.0, min_p=0.3), lambda p: p >= 0.3 * p.max()),
        (SamplingParams(temperature=1.0, top_k=1), lambda p: p == p.max()),
        (SamplingParams(temperature=1.0, top_p=1e-9), lambda p: p == p.max()),
    ],
)
def test_truncation_keeps_exactly_the_allowed_tokens_and_renormalises(sampling, allowed) -> None:
    logits = _logits(1, seed=3)
    probs = logits[0].softmax(-1).double().numpy()
    kept = np.where(allowed(probs), probs, 0.0)
    frequencies = _frequencies(sampling, logits)
    assert set(np.flatnonzero(frequencies)) <= set(np.flatnonzero(kept))
    assert np.abs(frequencies - kept / kept.sum()).max() < 5 * np.sqrt(0.25 / 4000)


def _nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    keep = np.zeros(VOCAB, bool)
    keep[order[before < top_p]] = True
    return keep


def test_a_seeded_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = _logits(4, seed=5)
    seeded = SamplingParams(temperature=1.0, seed=7)
    other = SamplingParams(temperature=0.8, top_k=5)
    alone, _ = _sample(logits[:1], [_row(seeded, number=0, num_output_tokens=9)])
    batch = [_row(seeded, number=33, num_output_tokens=9), *(_row(other, number=i) for i in range(1, 4))]
    assert _sample(logits, batch, 123)[0][0] == alone[0]
    flipped = [1, 2, 3, 0]
    assert _sample(logits[flipped], [batch[i] for i in flipped], 9)[0][3] == alone[0]


def test_draws_differ_between_positions_seeds_and_unseeded_requests() -> None:
    logits = torch.zeros(1, 10_000)
    rows = [
        _row(SamplingParams(temperature=1.0, seed=1), num_output_tokens=0),
        _row(SamplingParams(temperature=1.0, seed=1), num_output_tokens=1),
        _row(SamplingParams(temperature=1.0, seed=2), num_output_tokens=0),
        _row(SamplingParams(temperature=1.0), number=1),
        _row(SamplingParams(temperature=1.0), number=2),
    ]
    token_ids, _ = _sample(logits.expand(len(rows), -1), rows)
    assert len(set(token_ids)) == len(rows)


def test_logprobs_are_the_models_own_whatever_the_temperature() -> None:
    logits = _logits(2, seed=8)
    rows = [_row(SamplingParams(temperature=0.3, top_k=2, logprobs=4)), _row(SamplingParams(logprobs=0))]
    token_ids, logprobs = _sample(logits, rows)
    expected = logits.log_softmax(-1)
    assert logprobs[0].chosen == pytest.approx(float(expected[0, token_ids[0]]))
    assert [i for i, _ in logprobs[0].top] == expected[0].topk(4).indices.tolist()
    assert logprobs[1].chosen == pytest.approx(float(expected[1].max()))
    assert logprobs[1].top == ()


def test_rows_that_ask_for_as_many_logprobs_are_scored_together() -> None:
    logits = _logits(7, seed=9)
    asked = [2, None, 0, 2, 5, 0, 2]
    rows = [_row(SamplingParams(logprobs=num_top), number=i) for i, num_top in enumerate(asked)]
    chosen = choose(logits, rows, 0)
    scored = score_rows(logits, rows, chosen)
    assert [places for places, _ in scored] == [[0, 3, 6], [2, 5], [4]]
    expected = logits.log_softmax(-1)
    for places, scores in scored:
        for i, one in zip(places, scores.as_logprobs(), strict=True):
            values, ids = expected[i].topk(asked[i] or 0)
            assert one == Logprobs(
                float(expected[i, chosen[i]]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
            )


def test_a_row_that_truncates_nothing_draws_in_the_order_of_ids_without_sorting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = _logits(64, seed=11)
    rows = [_row(SamplingParams(temperature=0.8, seed=i)) for i in range(64)]
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: pytest.fail("sorts"))
    chosen = choose(logits, rows, 0)
    after = (logits.double() / 0.8).softmax(-1).cumsum(-1)
    for i, token_id in enumerate(chosen.tolist()):
        number = np.random.Generator(np.random.Philox(key=np.array([i, 0], np.uint64))).random(dtype=np.float32)
        assert (float(after[i, token_id - 1]) if token_id else 0.0) - 1e-6 <= number < float(after[i, token_id]) + 1e-6


def test_no_draw_falls_on_a_token_without_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the ends of the numbers that there are: ids below the first possible one, and above the last."""
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[:, 10:40] = _logits(3)[:, 10:40]
    for number, least, most in ((0.0, 10, 10), (1 - 2**-24, 39, 39)):
        monkeypatch.setattr(sampler, "_uniform", lambda row, seed, number=number: number)
        drawn = choose(logits, [_row(SamplingParams(temperature=1.0), i) for i in range(3)], 0).tolist()
        assert all(least <= token_id <= most for token_id in drawn)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
        {"top_k": -1},
        {"top_k": 2**70},
        {"max_tokens": 0},
        {"stop": "a text, not a tuple of texts"},
        {"stop": ("a", "")},
        {"logprobs": -1},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadParameterError, match=next(iter(wrong))):
        SamplingParams(**wrong)
