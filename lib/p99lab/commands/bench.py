"""`p99lab bench`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from p99lab.commands.console import needs_extra, out
from p99lab.errors import BadParameterError

if TYPE_CHECKING:
    from p99lab.lab.bench.rows import BenchRow

H200 = "h200"
DETAILS_EVERY_S = 5.0  # writing takes the time of many steps, and other rows follow


def bench(
    name: Annotated[
        str,
        typer.Argument(help="plan (control plane), cpu (beside transformers), ingest (HTTP) or h200 (a GPU, 128K)."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Rows with hardware and revision as JSON.")] = False,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="A folder for bench_NAME.json, .parquet and .md, kept up row by row.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CASE", help="h200: this case (repeatable).")] = None,
    size: Annotated[list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="h200: overrides a size.")] = None,
    vllm_site: Annotated[
        Path | None, typer.Option(help="h200: the folder vLLM is installed in (pip install --target).")
    ] = None,
    model_dir: Annotated[
        Path | None, typer.Option(help="h200: vLLM's config and tokenizer, of the same shape.")
    ] = None,
    vllm_argument: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAG", help="h200: --flag=value, in place of the flags vLLM is measured with (repeatable)."
        ),
    ] = None,
) -> None:
    """Measure speed: each figure beside its floor by arithmetic, and beside a peer in the same run.

    `× floor` is 1 at the floor and larger when worse; `× peer` is above 1 where this project is better. A bar is what a
    figure must not exceed; it is judged for the sizes that it is stated for alone. Notes follow the table.

    Cases of h200, in process: decode-1, decode-64, decode-short, questions-64, prefill, warm; closed-idle (the time in
    which no step runs and the host's time a step, 64 clients in the engine's loop); steps (made by hand, as the loads
    have them: measured, predicted, and in the files what each kind of kernel takes); groups (steps with the chosen
    prefix groups against the faster of two ways without, over a grid: the worst are shown, all are in the files);
    compile (a decoder layer without attention by our kernels, plain torch and torch.compile: steady, and until the
    first result). Over HTTP: itl-1, ttft-1, itl-64, itl-short, cold. -p primed=fake: documents of random keys and
    values, which nobody computes; nothing is judged then.
    """
    for_h200 = {"--only": only, "-p": size, "--vllm-site": vllm_site, "--model-dir": model_dir}
    for_h200["--vllm-argument"] = vllm_argument
    if name != H200 and (given := [option for option, value in for_h200.items() if value]):
        raise BadParameterError(f"{', '.join(given)}: only for p99lab bench {H200}")
    if (vllm_site is None) != (model_dir is None):
        raise BadParameterError("--vllm-site and --model-dir go together")
    if vllm_argument and vllm_site is None:
        raise BadParameterError("--vllm-argument: only with --vllm-site")
    with needs_extra("engine", f"p99lab bench {name}"):
        from p99lab.lab.bench import report
        from p99lab.lab.reserve import make_writable

        if name == H200:
            rows = _h200(only or [], size or [], vllm_site, model_dir, vllm_argument or [], out_dir)
        else:
            report.check(name)
            if out_dir is not None:
                make_writable(out_dir)
            rows = report.run(name)
            if out_dir is not None:
                report.write(out_dir, name, rows)
    if as_json:
        out.print_json(data=report.as_record(rows))
    else:
        out.print(report.table(rows))
        for line in report.notes(rows):
            out.print(line, markup=False)


def _h200(
    only: list[str],
    sizes: list[str],
    site: Path | None,
    model_dir: Path | None,
    vllm_arguments: list[str],
    out_dir: Path | None,
) -> list[BenchRow]:
    """Its rows; progress goes to stderr, and what is known so far to the folder."""
    from p99lab.lab.bench import h200, report
    from p99lab.lab.bench.h200_sizes import H200Bench, chosen
    from p99lab.lab.parameters import given
    from p99lab.lab.reserve import make_writable
    from p99lab.lab.vllm_server import spec_of

    asked, cases = H200Bench.parse(given(H200Bench, sizes)), chosen(only)
    spec = spec_of(None if site is None else str(site), None if model_dir is None else str(model_dir), vllm_arguments)
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    found = h200.rows(asked, cases, spec, lambda line: progress.print(line, markup=False))
    if out_dir is not None:
        make_writable(out_dir)
    rows: list[BenchRow] = []
    written_s = 0.0
    for row in found:
        rows.append(row)
        if out_dir is not None and not (row.detail and time.monotonic() - written_s < DETAILS_EVERY_S):
            report.write(out_dir, H200, rows)
            written_s = time.monotonic()
    return rows
