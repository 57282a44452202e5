"""`compile` of `p99lab bench h200`: a decoder layer's products by our kernels, by plain torch, and by torch.compile.

Attention is a stub that returns its queries. Every way runs the same weights over the same number of tokens, eight
layers one after the other in a CUDA graph; `max-autotune` brings graphs of its own and is called layer by layer. What a
way costs before its first result is measured with empty caches, but for CUDA and its libraries, which are there.

Executed as a module this *is* the process that measures: compilers keep memory and may crash. Sizes as JSON in its
arguments; on its standard output a line of JSON for each way and number of tokens, as soon as it is known.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p99lab.engine.geometry import Geometry
from p99lab.engine.model_store import check
from p99lab.lab.bench.h200_floors import ELEMENT_BYTES, Rates, layer_floor_s
from p99lab.lab.bench.h200_sizes import H200Bench, Way
from p99lab.lab.bench.rows import BenchRow
from p99lab.serving import child

if TYPE_CHECKING:
    from p99lab.engine.weights import Weights

MODULE = "p99lab.lab.bench.h200_compile"
UNIT = "µs/layer"
GRACE_S = 45.0  # for imports, and for what has begun before the time was over
NEEDS_GPU: frozenset[Way] = frozenset({"max-autotune-no-cudagraphs", "max-autotune"})


@dataclass(frozen=True, slots=True)
class LayerTime:
    """A way with a number of tokens. `layer_s`: one layer, the median of `n`; `first_s`: until the first result.

    Both None where there is no figure; `note` says why.
    """

    way: Way
    num_tokens: int
    layer_s: float | None = None
    first_s: float | None = None
    n: int = 0
    note: str | None = None


def rows(bench: H200Bench, geometry: Geometry, rates: Rates) -> Iterator[BenchRow]:
    """A layer's microseconds by every way and number of tokens; then the seconds until their first results."""
    found = measure(bench)
    for timed in found:
        yield _layer_row(bench, timed, found, 1e6 * layer_floor_s(geometry, timed.num_tokens, rates, _size(bench)))
    for timed in found:
        if timed.first_s is not None:
            yield BenchRow(f"{_name(timed)}, first result", timed.first_s, "s", n=1)


def measure(bench: H200Bench) -> list[LayerTime]:
    """Run the process to its end, or until its time is over. Whatever has no figure then says so."""
    with tempfile.TemporaryDirectory() as scratch:
        told, errors = Path(scratch) / "figures", Path(scratch) / "errors"
        with told.open("w") as out, errors.open("w") as err:
            reason = _run(bench, scratch, out.fileno(), err.fileno())
        lines = [json.loads(line) for line in told.read_text().splitlines() if line.startswith("{")]
        said = [line.strip() for line in errors.read_text().splitlines() if line.strip()]
    found = [LayerTime(**line) for line in lines]
    if reason is None:
        return found
    measured = {(timed.way, timed.num_tokens) for timed in found}
    note = f"{reason}: {said[-1]}" if said else reason
    return found + [LayerTime(*one, note=note) for one in _asked(bench) if one not in measured]


def _run(bench: H200Bench, scratch: str, out: int, err: int) -> str | None:
    """Why the process has not ended well; None: it has."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
    command = child.command(MODULE, [bench.model_dump_json()])
    try:
        timeout_s = bench.compile_budget_s + GRACE_S
        done = subprocess.run(command, stdout=out, stderr=err, env=os.environ | caches, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {timeout_s:.0f} s"
    return f"ended with {done.returncode}" if done.returncode else None


def _asked(bench: H200Bench) -> list[tuple[Way, int]]:
    return [(way, num_tokens) for way in bench.compile_ways for num_tokens in bench.compile_tokens]


def _name(timed: LayerTime) -> str:
    return f"compile: {timed.way}, T = {timed.num_tokens}"


def _size(bench: H200Bench) -> int:
    return ELEMENT_BYTES[bench.dtype]


def _layer_row(bench: H200Bench, timed: LayerTime, found: Sequence[LayerTime], floor_us: float) -> BenchRow:
    if timed.layer_s is None:
        return BenchRow(_name(timed), math.nan, UNIT, floor_us, note=timed.note)
    peer = fastest_other(timed, found) if timed.way == "own" else None
    theirs = None if peer is None or peer.layer_s is None else 1e6 * peer.layer_s
    value = 1e6 * timed.layer_s
    return BenchRow(
        name=_name(timed),
        value=value,
        unit=UNIT,
        floor=floor_us,
        ratio_to_floor=value / floor_us,
        peer=None if peer is None else peer.way,
        peer_value=theirs,
        ratio_to_peer=None if theirs is None else theirs / value,
        n=timed.n,
        note=timed.note,
    )


def fastest_other(timed: LayerTime, found: Sequence[LayerTime]) -> LayerTime | None:
    """Of the ways but this one, for as many tokens; None: none has a figure."""
    others = [
        other
        for other in found
        if other.way != timed.way and other.num_tokens == timed.num_tokens and other.layer_s is not None
    ]
    return min(others, key=lambda other: other.layer_s or math.inf, default=None)


# --- the process that measures --------------------------------------------------------------------------------------


def layer_times(bench: H200Bench) -> Iterator[LayerTime]:
    """Measure in this process, way by way, while `compile_budget_s` lasts."""
    import torch

    from p99lab.lab.bench.h200_layers import one_layer

    ends_s = time.perf_counter() + bench.compile_budget_s
    on_gpu = bench.device.startswith("cuda")
    weights = one_layer(check(bench.model), getattr(torch, bench.dtype), torch.device(bench.device), bench.seed)
    for way, num_tokens in _asked(bench):
        if way in NEEDS_GPU and not on_gpu:
            yield LayerTime(way, num_tokens, note="not measured: takes a GPU")
        elif time.perf_counter() > ends_s:
            yield LayerTime(way, num_tokens, note=f"not measured: {bench.compile_budget_s:g} s were over")
        else:
            yield _layer_time(way, weights, num_tokens)


def _layer_time(way: Way, weights: Weights, num_tokens: int) -> LayerTime:
    from p99lab.lab.bench.h200_layers import OWN_GRAPHS, times

    try:
        found = times(way, weights, num_tokens)
    except Exception as error:  # of a compiler: it may be missing, or have met what it cannot do
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return LayerTime(way, num_tokens, note=f"failed: {(lines or [type(error).__name__])[0]}")
    note = "graphs of its own, a call for each layer" if way in OWN_GRAPHS else None
    return LayerTime(way, num_tokens, found.layer_s, found.first_s, found.n, note)


def _main() -> None:
    for timed in layer_times(H200Bench.parse(json.loads(sys.argv[1]))):
        sys.stdout.write(json.dumps(asdict(timed)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
