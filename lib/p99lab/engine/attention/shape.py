"""The sizes of a captured step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a captured step has room for.

    `num_partials`: partial attention results, as many of spans (none where there are no `spans`) as of runs.
    `num_runs`: runs before they are cut. `num_causal`: stretches of causal attention; 0 where all rows have one token.
    `num_samples`: rows that sample.
    """

    num_tokens: int
    num_partials: int
    num_runs: int
    num_causal: int
    num_samples: int
    spans: bool
