"""The decision page: which measure helps which load, each line with the run that shows it.

Works on the base install.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from p99lab.lab.effects import EFFECTS, Effect, read_effects
from p99lab.lab.inspection import REPORT
from p99lab.lab.ledger import Completed, completed
from p99lab.lab.staleness import Present, changes


@dataclass(frozen=True, slots=True)
class Decision:
    """One line. `run`, `report` and `effect` are None for a measure that no run has tried."""

    measure: str
    effect: Effect | None = None
    hardware: str | None = None
    run: str | None = None
    report: Path | None = None
    stale: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return "not measured" if self.effect is None else self.effect.verdict

    @property
    def size(self) -> str:
        """`E2E P99 1.32 times shorter [1.15, 1.61]`."""
        if (effect := self.effect) is None:
            return ""
        ratio, word = (effect.ratio, "shorter") if effect.ratio >= 1 else (1 / effect.ratio, "longer")
        bounds = ["?" if bound is None else f"{bound:.2f}" for bound in (effect.ci_low, effect.ci_high)]
        return f"{effect.metric} {ratio:.2f} times {word} (ratio {effect.ratio:.2f} [{', '.join(bounds)}])"

    @property
    def under(self) -> str:
        """The load and what else the answer depends on."""
        if (effect := self.effect) is None:
            return ""
        return "; ".join((effect.load, *(f"{name} {value}" for name, value in effect.conditions.items())))


def decisions(outputs: Path, measures: Iterable[str] = ()) -> list[Decision]:
    """What the latest sound run on each kind of hardware says of each measure under each load.

    Runs whose files were changed after their end say nothing. `measures`: named even where no run has tried them.
    """
    present = Present()
    latest: dict[tuple[str, ...], Decision] = {}
    for found in completed(outputs, present):
        for decision in _of_run(found, present) if found.withdrawn is None else ():
            effect = decision.effect
            assert effect is not None
            latest.setdefault((effect.measure, effect.load, effect.metric, str(decision.hardware)), decision)
    tried = {decision.measure for decision in latest.values()}
    return [*latest.values(), *(Decision(measure) for measure in measures if measure not in tried)]


def _of_run(found: Completed, present: Present) -> list[Decision]:
    run = found.run
    since = tuple(changes(run.path, run.record, present))
    return [
        Decision(effect.measure, effect, found.hardware, run.id, run.path / REPORT, since)
        for effect in read_effects(run.path / EFFECTS)
    ]
