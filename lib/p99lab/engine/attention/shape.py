"""The sizes of a captured step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a captured step has room for.

    `num_span_partials`: partial attention results of spans; 0: it has no spans. `num_decode_spans`, and
    `num_decode_partials`: decode spans and their partial results before they are cut. `num_causal`: stretches of causal
    attention; 0 where all rows have one token. `num_samples`: rows that sample.
    """

    num_tokens: int
    num_span_partials: int
    num_decode_spans: int
    num_decode_partials: int
    num_causal: int
    num_samples: int
