"""Two runs side by side: what is not alike about them, and for each metric whether B is better, worse, or neither.

The rule: the 95 % interval of the ratio B/A (`probe.ratios`). One that leaves 1 out says that B is larger or smaller,
and the metric's kind whether that is better. Where a bound that a side needs is missing, that side stays open; the
other one may still settle it. What varies between two runs of the same thing is not in it.

There is no verdict where the two were asked different things: another tier, workload or load, on other hardware. Code
and all other parameters may differ, since they are what one compares, and so may the seed.

Works on the base install.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
import yaml
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from p99lab.errors import BadParameterError, P99labError
from p99lab.lab import inspection, runs
from p99lab.lab.figures import FIGURES, read_figures
from p99lab.lab.results import shown
from p99lab.probe import ratios
from p99lab.probe.stats import METRICS, QUANTILES

CHANCE = 0.05  # of the intervals leave 1 out where nothing differs
NAMED = 4  # names that are listed before the rest is counted
PROBE_FILE = "summary.json"
_FROM_SEND = "_from_send"
_WORKLOAD = re.compile(
    r"model|random_tokens|num_documents|(document|question|answer)_tokens_\w+|concurrency|open_share"
)
_NOT_WORKLOAD = frozenset({"target", "endpoint", "api_key_env", "tokenizer", "seed", "repetition"})  # a probe's options
_LOWER_IS_BETTER = ("s", "ms")
_HIGHER_IS_BETTER = ("hit_rate", "cached_share", "goodput")


class Said(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    DIFFERS = "differs"  # and nothing says which way is better
    SAME = "same"  # counted, not sampled, and equal
    CANNOT_TELL = "cannot tell"
    NOT_ALIKE = "not alike"  # the two were asked different things


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure of one run and the bounds of its 95 % interval, None where there is no such bound."""

    value: float | None
    low: float | None = None
    high: float | None = None
    is_void: bool = False

    @property
    def is_exact(self) -> bool:
        return self.value is not None and self.low == self.value == self.high


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of both runs. `ratio`: B/A with its interval; `why`: where nothing can be told."""

    name: str
    unit: str
    a: Estimate
    b: Estimate
    ratio: float | None
    low: float | None
    high: float | None
    said: Said
    why: str = ""

    @property
    def is_compared(self) -> bool:
        """Whether an interval took part: those are what chance has a share in."""
        return (self.low is not None or self.high is not None) and not self.a.is_exact


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared. `facts`: what should be alike; `asked`: what has to be, for a verdict; `metrics`: unit and
    estimate by name; `void`: what must not be used, and why."""

    name: str
    kind: str  # a run of which notebook, or a probe
    facts: Mapping[str, Any]
    metrics: Mapping[str, tuple[str, Estimate]]
    prompts: Mapping[int, str] = field(default_factory=dict)  # digest by the request's index
    void: Sequence[str] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`unlike`: what is not alike, a line each; `void`: what gives no verdict, and why; `asked_otherwise`: what they
    were asked differently, for which nothing gives a verdict."""

    a: str
    b: str
    unlike: tuple[str, ...]
    void: tuple[str, ...]
    metrics: tuple[Metric, ...]
    asked_otherwise: tuple[str, ...] = ()

    @property
    def num_compared(self) -> int:
        return sum(metric.is_compared for metric in self.metrics)

    @property
    def num_by_chance(self) -> float:
        """How many of the compared metrics would be told apart, on average, if nothing differed."""
        return CHANCE * self.num_compared

    def as_record(self) -> dict[str, Any]:
        """What `p99lab runs compare --json` prints."""
        counts = {"compared": self.num_compared, "expected_by_chance": self.num_by_chance}
        return {**asdict(self), **counts}


def compare(outputs: Path, a: str, b: str, anyway: bool = False) -> Comparison:
    """Compare two runs (ids, their beginnings, folders), or two folders that `p99lab probe --output` wrote.

    Args:
        anyway: give verdicts even where the two were asked different things.

    Raises:
        BadParameterError: one of them is not there, both are the same, or they measure different things.
        P99labError: a run has not ended, or was changed after its end.
    """
    first, second = side(outputs, a), side(outputs, b)
    if first.kind != second.kind:
        raise BadParameterError(f"nothing to compare: {a} is {first.kind}, {b} is {second.kind}")
    if first.name == second.name or Path(a).resolve() == Path(b).resolve():
        raise BadParameterError(f"nothing to compare: {a} and {b} are one and the same")
    return contrast(first, second, anyway)


def contrast(a: Side, b: Side, anyway: bool = False) -> Comparison:
    """The comparison of two sides of one kind."""
    otherwise = () if anyway else tuple(_differing(a.asked, b.asked))
    names = [name for name in a.metrics if name in b.metrics]
    metrics: Iterable[Metric] = (_metric(name, a.metrics[name], b.metrics[name]) for name in names)
    if otherwise:
        metrics = (replace(one, low=None, high=None, said=Said.NOT_ALIKE, why="") for one in metrics)
    known = [metric for metric in metrics if metric.a.value is not None or metric.b.value is not None]
    void = tuple(f"{which}: {reason}" for which, one in (("A", a), ("B", b)) for reason in one.void)
    return Comparison(a.name, b.name, tuple(_unlike(a, b)), void, tuple(_once(known)), otherwise)


def better_when(name: str, unit: str) -> str | None:
    """`lower` for times, `higher` for rates and hits, None where nothing says."""
    if unit in _LOWER_IS_BETTER:
        return "lower"
    return "higher" if unit.endswith("/s") or any(part in name for part in _HIGHER_IS_BETTER) else None


def _metric(name: str, a: tuple[str, Estimate], b: tuple[str, Estimate]) -> Metric:
    (unit, before), (other_unit, after) = a, b
    ratio = ratios.ratio(after, before)
    if problem := _problem(before, after, unit, other_unit):
        return Metric(name, unit, before, after, ratio, None, None, Said.CANNOT_TELL, problem)
    if before.is_exact and after.is_exact and before.value == after.value:
        return Metric(name, unit, before, after, ratio, ratio, ratio, Said.SAME)
    low, high = ratios.bounds(after, before)
    return Metric(name, unit, before, after, ratio, low, high, *_say(low, high, better_when(name, unit)))


def _problem(a: Estimate, b: Estimate, unit: str, other_unit: str) -> str:
    if a.is_void or b.is_void:
        return "both void" if a.is_void and b.is_void else f"void in {'A' if a.is_void else 'B'}"
    if a.value is None or b.value is None:
        return f"no figure in {'A' if a.value is None else 'B'}"
    return f"measured in {unit} and in {other_unit}" if unit != other_unit else ""


def _say(low: float | None, high: float | None, better: str | None) -> tuple[Said, str]:
    is_larger, is_smaller = low is not None and low > 1, high is not None and high < 1
    if not is_larger and not is_smaller:
        return Said.CANNOT_TELL, "" if low is not None and high is not None else "no bound"
    if better is None:
        return Said.DIFFERS, ""
    return (Said.BETTER if is_larger == (better == "higher") else Said.WORSE), ""


def _once(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Each pair of samples once: a claim's figure may be a percentile of the table."""
    seen: set[tuple[Estimate, Estimate]] = set()
    for metric in metrics:
        pair = (metric.a, metric.b)
        is_sampled = any(bound is not None for one in pair for bound in (one.low, one.high)) and not metric.a.is_exact
        if not (is_sampled and pair in seen):
            yield metric
        seen.add(pair)


def _unlike(a: Side, b: Side) -> Iterator[str]:
    for fact in dict.fromkeys((*a.facts, *b.facts)):
        ours, theirs = a.facts.get(fact), b.facts.get(fact)
        if isinstance(ours, dict) or isinstance(theirs, dict):
            yield from _unlike_names(fact, ours or {}, theirs or {})
        elif ours != theirs:
            yield f"{fact}: {shown(ours)} → {shown(theirs)}"
    common = a.prompts.keys() & b.prompts.keys()
    if differing := sum(a.prompts[index] != b.prompts[index] for index in common):
        yield f"prompts: {differing} of the {len(common)} requests that both sent differ"
    for which, own, other in (("A", a, b), ("B", b, a)):
        if alone := [name for name in own.metrics if name not in other.metrics]:
            yield f"metrics only in {which}: {_listed(alone)}"


def _unlike_names(fact: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    differing = _differing(a, b)
    if differing and fact == "modules":  # their digests say nothing to a reader
        yield f"code: {_listed(differing)}"
    elif differing:
        yield f"{fact}: {_listed([f'{name} {shown(a.get(name))} → {shown(b.get(name))}' for name in differing])}"


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# --- reading --------------------------------------------------------------------------------------------------------


def side(outputs: Path, name: str) -> Side:
    """A run or a probe's folder, read.

    Raises:
        BadParameterError: there is no such thing, or its files cannot be read.
        P99labError: a run that has not ended, or was changed after its end.
    """
    import duckdb

    folder = Path(name)
    try:
        if (folder / PROBE_FILE).is_file() and not (folder / "run.json").exists():
            return _of_probe(folder, name)
        return _of_run(runs.find(outputs, name))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, duckdb.Error) as error:
        raise BadParameterError(f"{name} cannot be read: {str(error).splitlines()[0]}") from None


def _of_run(run: runs.Run) -> Side:
    changed = inspection.changes(run)
    if changed is None:
        raise P99labError(f"no verdict: run {run.id} was never sealed ({run.status})")
    if changed:
        raise P99labError(f"no verdict: run {run.id} was changed after its end ({', '.join(changed)})")
    metrics = {**_percentiles(run), **_figures(run)}
    facts = _facts(run)
    workload = {name: value for name, value in facts["parameters"].items() if _WORKLOAD.fullmatch(name)}
    asked = {"tier": run.tier, "hardware": run.hardware, **workload}
    return Side(run.id, f"a run of {run.notebook}", facts, metrics, _prompts(run), inspection.void(run), asked)


def _facts(run: runs.Run) -> dict[str, Any]:
    environment = _json(run.path / "environment.json")
    packages = environment.get("packages", {})
    return {
        "status": run.status,
        "hardware": run.hardware,
        "machine": _json(run.path / "hardware.json").get("id"),
        "tier": run.tier,
        "parameters": yaml.safe_load((run.path / "parameters.yaml").read_text()) or {},
        "revision": run.revision or None,
        "modules": _json(run.path / "sources.json"),
        "python": environment.get("python"),
        "packages": packages,
    }


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where a run of its age or kind has no such file."""
    content = orjson.loads(path.read_bytes()) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _figures(run: runs.Run) -> dict[str, tuple[str, Estimate]]:
    figures = read_figures(run.path / FIGURES)
    return {name: (one.unit, Estimate(one.value, one.ci_low, one.ci_high)) for name, one in figures.items()}


def _percentiles(run: runs.Run) -> dict[str, tuple[str, Estimate]]:
    """`stock, closed: e2e P99`, … from a table of percentiles, if the run has one; not from send: that hides queues."""
    with runs.connect([run]) as connection:
        rows = connection.sql("FROM percentiles").to_arrow_table().to_pylist()
    metrics = {}
    for row in (row for row in rows if not row["metric"].endswith(_FROM_SEND)):
        for column in (*QUANTILES, "std"):
            bounds = (row.get(column), row.get(f"{column} low"), row.get(f"{column} high"), bool(row.get("void")))
            metrics[f"{row['arm']}, {row['load']}: {row['metric']} {_title(column)}"] = ("s", Estimate(*bounds))
    return metrics


def _prompts(run: runs.Run) -> dict[int, str]:
    if not (run.path / "metrics" / "requests.parquet").is_file():
        return {}
    with runs.connect([run]) as connection:
        return dict(connection.sql("SELECT DISTINCT index, prompt_digest FROM requests").fetchall())


def _of_probe(folder: Path, name: str) -> Side:
    summary = orjson.loads((folder / PROBE_FILE).read_bytes())
    void = bool(summary["void"])
    metrics = {}
    for metric in (metric for metric in METRICS if metric in summary and not metric.endswith(_FROM_SEND)):
        for column in (*QUANTILES, "std"):
            figure = summary[metric][column]
            low, high = figure["ci95"]
            metrics[f"{metric} {_title(column)}"] = ("s", Estimate(figure["value"], low, high, void))
    for rate, unit in {"requests_per_s": "requests/s", "output_tokens_per_s": "tokens/s"}.items():
        metrics[rate] = (unit, Estimate(summary.get(rate), is_void=void))
    metrics["cached_share"] = ("", Estimate(summary["hit_rates"]["cached_share"], is_void=void))
    facts = {**summary["target"], "workload digest": summary["workload_digest"], "options": summary["options"]}
    asked = {option: value for option, value in summary["options"].items() if option not in _NOT_WORKLOAD}
    return Side(name, "a probe", facts, metrics, void=summary["void"], asked=asked)


def _title(column: str) -> str:
    return {"p999": "P99.9", "std": "spread"}.get(column, column.upper())


# --- for a terminal -------------------------------------------------------------------------------------------------


def page(comparison: Comparison) -> RenderableType:
    """For a terminal: what is not alike, every metric, and how far the verdicts carry."""
    return Group(Text("\n".join(_preface(comparison))), _table(comparison), Text("\n".join(_remarks(comparison))))


def _preface(comparison: Comparison) -> Iterator[str]:
    yield f"A  {comparison.a}"
    yield f"B  {comparison.b}"
    yield from (f"not alike  {line}" for line in comparison.unlike or ("nothing that was recorded",))
    yield from (f"void       {line}" for line in comparison.void)
    if comparison.asked_otherwise:
        names = ", ".join(comparison.asked_otherwise)
        yield f"no verdict they were asked different things ({names}); --anyway compares them all the same"


def _table(comparison: Comparison) -> Table:
    """Metrics that both have, under the arm and load that they belong to."""
    table = Table("", "A", "B", "B/A, 95 % CI", "B is", box=box.SIMPLE, pad_edge=False)
    above = ""
    for metric in filter(_is_in_both, comparison.metrics):
        group, _, name = metric.name.rpartition(": ")
        if group != above:
            table.add_row(escape(group), style="bold")
        above = group
        said = metric.said + (f" ({metric.why})" if metric.why else "")
        style = {Said.BETTER: "green", Said.WORSE: "red"}.get(metric.said)
        values = (f"{shown(one.value)} {metric.unit}".rstrip() for one in (metric.a, metric.b))
        table.add_row(*map(escape, ("  " * bool(group) + name, *values, _ratio(metric), said)), style=style)
    return table


def _is_in_both(metric: Metric) -> bool:
    return metric.a.value is not None and metric.b.value is not None


def _ratio(metric: Metric) -> str:
    if metric.ratio is None:
        return ""
    bounds = {
        (False, False): "",
        (True, False): f" [≥ {shown(metric.low)}]",
        (False, True): f" [≤ {shown(metric.high)}]",
        (True, True): f" [{shown(metric.low)}, {shown(metric.high)}]",
    }
    return shown(metric.ratio) + bounds[metric.low is not None, metric.high is not None]


def _remarks(comparison: Comparison) -> Iterator[str]:
    both = list(filter(_is_in_both, comparison.metrics))
    if not both:
        yield "the two have no figure in common"
        return
    counts = Counter(metric.said for metric in both)
    alone = len(comparison.metrics) - len(both)
    rest = f"; {alone} more have a figure in one of the two alone" if alone else ""
    yield f"{len(both)} metrics: " + ", ".join(f"{counts[said]} {said}" for said in Said if counts[said]) + rest
    if comparison.asked_otherwise:
        return
    yield (
        f"{comparison.num_compared} of them have intervals: if nothing differed, about {comparison.num_by_chance:.1f} "
        "would be told apart by chance"
    )
    yield "An interval holds what varies inside one run. What varies from run to run, compare A with a repeat of A."
