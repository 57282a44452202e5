"""Claims: what was stated, and the verdict that follows from figures by a rule fixed beforehand.

`params/claims.yaml` holds the claims and explains its own fields. `verdict` is the one place where a claim and figures
become a verdict; notebooks and `ledger` call it. Works on the base install.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import yaml
from pydantic import Field, model_validator

from p99lab import project
from p99lab.errors import BadParameterError
from p99lab.lab.figures import Conditions, Figure
from p99lab.strict import StrictModel

WITHIN = 0.15  # of our figure, for the stated one
WITHIN_POINTS = 5.0  # where the unit is percent
HALF_WIDTH = 0.10  # of our figure, for its confidence interval
SAME_CONDITION = 0.05  # two numbers that near are one condition

Condition = bool | int | float | str | list[Any] | dict[Literal["min", "max"], int | float]


class Side(StrictModel):
    """One side of a threshold; a figure is on it when its whole confidence interval is."""

    metric: str
    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _one_threshold(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("give one of 'above' and 'below'")
        return self

    def holds(self, figures: Mapping[str, Figure]) -> bool:
        figure = figures.get(self.metric)
        if figure is None or figure.ci95 is None:
            return False
        low, high = figure.ci95
        return (self.above is None or low > self.above) and (self.below is None or high < self.below)

    def found(self, figures: Mapping[str, Figure]) -> str:
        """The threshold, and what the figure was."""
        figure = figures.get(self.metric)
        if figure is None or figure.value is None:
            return str(self)
        ci95 = f" [{figure.ci95[0]:.3g}, {figure.ci95[1]:.3g}]" if figure.ci95 else ""
        return f"{self}: {figure.value:.3g}{ci95}"

    def __str__(self) -> str:
        side = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        return f"{self.metric} {side}"


class Rule(StrictModel):
    """The rule for one claim: which figure answers it and what would settle it."""

    kind: Literal["value", "ratio", "sign", "mechanism", "procedure", "arithmetic"]
    metric: str
    effect: Side | None = None
    refuted: Side | None = None
    needs: tuple[str, ...] = ()  # conditions without which a measurement cannot refute

    @model_validator(mode="before")
    @classmethod
    def _own_metric(cls, values: Any) -> Any:
        """A side without a metric means the rule's own."""
        if not isinstance(values, dict):
            return values
        sides = {name: values[name] for name in ("effect", "refuted") if isinstance(values.get(name), dict)}
        return {**values, **{name: {"metric": values.get("metric"), **side} for name, side in sides.items()}}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind in ("ratio", "sign", "mechanism") and self.effect is None:
            raise ValueError(f"kind '{self.kind}' needs an 'effect'")
        if self.kind in ("procedure", "arithmetic") and (self.effect or self.refuted):
            raise ValueError(f"kind '{self.kind}' has neither 'effect' nor 'refuted'")
        return self


class StatedFigure(StrictModel):
    """One figure of a claim that states several; what it leaves out is the claim's."""

    stated: float
    unit: str
    conditions: dict[str, Condition] = Field(default_factory=dict)
    effect: dict[str, Any] | None = None
    refuted: dict[str, Any] | None = None


class Claim(StrictModel):
    """One row of the ledger: a statement with at most one figure."""

    id: str
    chapter: str
    says: str
    stated: float | None = None
    unit: str | None = None
    inconsistent: str | None = None
    note: str | None = None
    conditions: dict[str, Condition] = Field(default_factory=dict)
    notebook: str
    test: Rule

    @model_validator(mode="after")
    def _testable(self) -> Self:
        if (self.stated is None) != (self.unit is None):
            raise ValueError("'stated' and 'unit' go together")
        if self.stated is None and self.test.kind in ("value", "ratio", "arithmetic"):
            raise ValueError(f"kind '{self.test.kind}' needs a 'stated' figure")
        if unknown := set(self.test.needs) - set(self.conditions):
            raise ValueError(f"'needs' names no condition of the claim: {', '.join(sorted(unknown))}")
        return self


def load_claims(path: Path | None = None) -> tuple[Claim, ...]:
    """Every claim, one per figure, in the order of the file (default: the project's `params/claims.yaml`).

    Raises:
        BadParameterError: the file is missing or malformed; one line that names the claim and the key.
    """
    path = path or project.root() / "params" / "claims.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadParameterError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise BadParameterError(f"{path}: {' '.join(str(error).split())}") from None
    entries = content.get("claims") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadParameterError(f"{path}: 'claims' must be a list of mappings")
    claims = tuple(claim for entry in entries for claim in _rows(entry, path))
    ids = [claim.id for claim in claims]
    if doubled := sorted({name for name in ids if ids.count(name) > 1}):
        raise BadParameterError(f"{path}: twice the same id: {', '.join(doubled)}")
    return claims


def _rows(entry: dict[str, Any], path: Path) -> list[Claim]:
    """One claim per stated figure of an entry; the entry itself where it names at most one."""
    try:
        if "figures" not in entry:
            return [Claim.parse(entry)]
        common = {key: value for key, value in entry.items() if key != "figures"}
        if not isinstance(entry["figures"], dict) or not entry["figures"]:
            raise BadParameterError(f"figures: expected a mapping of figures, got {entry['figures']!r}")
        return [_row(common, name, StatedFigure.parse(figure)) for name, figure in entry["figures"].items()]
    except BadParameterError as error:
        raise BadParameterError(f"{path}: {entry.get('id', 'a claim without id')}: {error}") from None


def _row(common: dict[str, Any], name: str, figure: StatedFigure) -> Claim:
    if twice := sorted({"stated", "unit"} & common.keys()):
        raise BadParameterError(f"'{twice[0]}' beside 'figures'")
    test = common.get("test")
    if isinstance(test, dict) and "metric" in test:
        sides = {"effect": figure.effect, "refuted": figure.refuted}
        own = {side: value for side, value in sides.items() if value is not None}
        test = {**test, **own, "metric": f"{test['metric']}/{name}"}
    conditions = {**common.get("conditions", {}), **figure.conditions}
    row = {"id": f"{common.get('id')}/{name}", "stated": figure.stated, "unit": figure.unit, "conditions": conditions}
    return Claim.parse({**common, **row, "test": test})


def rule_digest(claim: Claim) -> str:
    """What a claim's verdict is computed from, besides figures: its statement, conditions and test, the tolerances."""
    stated = claim.model_dump(mode="json", include={"stated", "unit", "conditions", "notebook", "test"})
    tolerances = [WITHIN, WITHIN_POINTS, HALF_WIDTH, SAME_CONDITION]
    return hashlib.blake2b(json.dumps([stated, tolerances], sort_keys=True).encode(), digest_size=16).hexdigest()


class Name(StrEnum):
    REPRODUCED = "reproduced"
    DIRECTION_ONLY = "direction only"
    NOT_REPRODUCED = "not reproduced"
    REFUTED = "refuted"
    CARRIED_OUT = "carried out"
    NOT_TESTABLE = "not testable here"


class Verdict(NamedTuple):
    """A name, or None where the figures settle nothing; `why` in a clause; `figure` is the one that answered."""

    name: Name | None
    why: str
    figure: Figure | None = None


def verdict(claim: Claim, figures: Mapping[str, Figure], conditions: Conditions) -> Verdict:
    """Judge one claim by a run's figures. `conditions` hold for the whole run; a figure's own come before them."""
    figure = answer(claim, figures)
    if figure is None:
        return Verdict(None, f"no figure {claim.test.metric}")
    if figure.takes is not None:
        return Verdict(Name.NOT_TESTABLE, f"it would take {figure.takes}", figure)
    if claim.unit is not None and figure.unit != claim.unit:
        return Verdict(None, f"measured in {figure.unit}, stated in {claim.unit}", figure)
    differing = differences(claim.conditions, {**conditions, **figure.conditions})
    name, why = _judge(claim, figure, figures, differing)
    return Verdict(name, "; ".join((why, *differing.values())), figure)


def machine_conditions(hardware: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions that a machine's fingerprint (`observe.hardware.fingerprint`) settles, as far as it is known."""
    known = {"numa_nodes": hardware["numa_nodes"]} if "numa_nodes" in hardware else {}
    if isinstance(gpus := hardware.get("gpus"), list):
        known["gpu"] = ", ".join(sorted({str(gpu.get("name", "unknown")) for gpu in gpus})) or "none"
    return known


def answer(claim: Claim, figures: Mapping[str, Figure]) -> Figure | None:
    """The figure that a claim's test asks for, or a run's word that its whole family cannot be had."""
    family = figures.get(claim.test.metric.partition("/")[0])
    return figures.get(claim.test.metric, family if family is not None and family.takes else None)


def differences(stated: Conditions, ours: Conditions) -> dict[str, str]:
    """The stated conditions that a run does not meet or does not say, each as `name ours (stated …)`."""
    return {
        name: f"{name} {_shown(ours.get(name, 'unknown'))} (stated {_shown(value)})"
        for name, value in stated.items()
        if name not in ours or not _same(value, ours[name])
    }


def _same(stated: Any, ours: Any) -> bool:
    if isinstance(stated, dict):
        return isinstance(ours, int | float) and stated.get("min", -math.inf) <= ours <= stated.get("max", math.inf)
    if isinstance(stated, str):
        return all(word in str(ours).lower() for word in stated.lower().split())
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not isinstance(ours, int | float):
        return bool(stated == ours)
    return math.isclose(stated, ours, rel_tol=SAME_CONDITION)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value.get('min', '')}–{value.get('max', '')}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _judge(
    claim: Claim, figure: Figure, figures: Mapping[str, Figure], differing: Mapping[str, str]
) -> tuple[Name | None, str]:
    test = claim.test
    if test.kind == "procedure":
        return _judge_procedure(figure, differing)
    if test.kind == "arithmetic":
        return (Name.REPRODUCED, "it follows") if _agrees(claim, figure) else (Name.REFUTED, "it does not follow")
    lacking = [name for name in test.needs if name in differing]
    if test.refuted is not None and test.refuted.holds(figures):
        if not lacking:
            return Name.REFUTED, str(test.refuted)
        return None, f"{test.refuted} would refute it under the stated {', '.join(lacking)}"
    if test.kind in ("value", "ratio") and not differing and _agrees(claim, figure) and _is_precise(figure):
        return Name.REPRODUCED, "conditions met"
    return _judge_effect(claim, figure, figures, not differing)


def _judge_procedure(figure: Figure, differing: Mapping[str, str]) -> tuple[Name | None, str]:
    if figure.value != 1.0:
        return None, "not carried out whole"
    return (None, "carried out otherwise than described") if differing else (Name.CARRIED_OUT, "as described")


def _judge_effect(
    claim: Claim, figure: Figure, figures: Mapping[str, Figure], conditions_met: bool
) -> tuple[Name | None, str]:
    """The stated size is not confirmed: does the direction hold, and may its absence be held against the claim?"""
    effect = claim.test.effect
    if effect is not None and effect.metric not in figures:
        return None, f"no figure {effect.metric}"
    if effect is not None and effect.holds(figures):
        settled = conditions_met and claim.test.kind in ("sign", "mechanism")
        return Name.REPRODUCED if settled else Name.DIRECTION_ONLY, effect.found(figures)
    shown = figure if effect is None else figures[effect.metric]
    if shown.ci95 is None:
        return None, f"no confidence interval (n = {shown.n})"
    why = "no direction is stated" if effect is None else f"not shown: {effect.found(figures)}"
    may_deny = conditions_met and (effect is not None or _is_precise(figure))
    return Name.NOT_REPRODUCED if may_deny else None, why


def _agrees(claim: Claim, figure: Figure) -> bool:
    assert claim.stated is not None
    assert figure.value is not None
    in_points = claim.unit in ("percent", "percentage points")
    return abs(claim.stated - figure.value) <= (WITHIN_POINTS if in_points else WITHIN * abs(figure.value))


def _is_precise(figure: Figure) -> bool:
    if figure.ci95 is None or figure.value is None:
        return False
    low, high = figure.ci95
    return (high - low) / 2 <= HALF_WIDTH * abs(figure.value)
