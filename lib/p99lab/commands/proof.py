"""`p99lab proof`."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from p99lab.commands.console import needs_extra, out


def proof(
    parts: Annotated[list[str] | None, typer.Argument(help="coverage, peers, clients, faults, listing; all.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Default: outputs/published/proof/.")] = None,
) -> None:
    """Prove what is too long for the tests, and keep the record. Exit code 1: a check has failed.

    `peers` and `clients` install other projects' packages into environments of their own, once.
    """
    from p99lab import project
    from p99lab.lab.proof import parts as proofs

    all_passed = True
    for part in proofs.chosen(parts or []):
        began, made = datetime.datetime.now(datetime.UTC), []
        with needs_extra("dev", f"p99lab proof {part}"), tempfile.TemporaryDirectory(prefix=f"p99lab-{part}-") as work:
            for check in proofs.checks(part, Path(work)):
                made.append(check)
                mark = "holds" if check.passed else "FAILS"
                why = "" if check.passed or not check.note else f": {check.note}"
                out.print(f"{part}: {check.name}: {check.found} ({check.expected}) {mark}{why}", markup=False)
        record = proofs.record(part, began, made)
        proofs.publish(record, folder or project.outputs_dir() / "published" / "proof")
        all_passed = all_passed and record.passed
    raise typer.Exit(0 if all_passed else 1)
