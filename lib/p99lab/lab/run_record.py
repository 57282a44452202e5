"""run.json and the files of provenance beside it: what ran, by which code and parameters, judged by which rules."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from p99lab import project
from p99lab.lab import alive, parameters, provenance, sources, units
from p99lab.lab.claims import load_claims, rule_digest
from p99lab.lab.job import Job
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.secrets import Secrets
from p99lab.observe import hardware


class RunRecord:
    """run.json: written when the run begins and again when it ends. A secret that gets into it is struck out."""

    def __init__(self, folder: RunFolder, secrets: Secrets, facts: Mapping[str, Any]) -> None:
        self._folder = folder
        self._secrets = secrets
        self._facts = dict(facts)

    @classmethod
    def begin(cls, job: Job, parent: Path, secrets: Secrets) -> Self:
        """Make the run's folder under `parent`, write what is known before its first cell runs, and restore units.

        Raises:
            BadParameterError: the claims cannot be read; no folder was made.
        """
        started = datetime.datetime.now(datetime.UTC)
        digests, rules = _code(job.notebook), _rules(job.contract.notebook)
        folder = RunFolder.create(parent)
        record = cls(folder, secrets, {"run_id": folder.run_id, **_what(job), "status": "running", "exit_code": None})
        record.update(reason="", started=started.isoformat(timespec="milliseconds"), runner=alive.this_process())
        folder.write("parameters.yaml", yaml.safe_dump(parameters.plain(job.parameters), sort_keys=False))
        folder.write_json("sources.json", digests)
        code = sources.digest(digests.items()) if digests else None
        record.update(code=code, rules=rules, **_provenance(folder))
        if job.resumes is not None:
            units.restore(folder, job.resumes.units)
        return record

    @property
    def folder(self) -> RunFolder:
        return self._folder

    def update(self, **facts: Any) -> None:
        self._facts |= facts
        self._folder.write_json(units.RUN_RECORD, self._secrets.redact_values(self._facts))

    def end(self, **facts: Any) -> None:
        """What is known once the last cell has run; of a resumed run, also which units it had to measure itself."""
        if (earlier := self._facts["resumed_from"]) is not None:
            facts["resumed_from"] = {**earlier, "measured": self._measured()}
        self.update(**facts, ended=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"))

    def _measured(self) -> list[str]:
        whole, _ = units.finished(self._folder)
        return [unit.manifest.name for unit in whole if unit.manifest.run_id == self._folder.run_id]


def _what(job: Job) -> dict[str, Any]:
    earlier = job.resumes
    return {
        "notebook": job.contract.notebook,
        "tier": job.tier,
        "parameters_digest": parameters.digest(job.parameters),
        "tier_digest": job.tier_digest,
        "resumed_from": earlier
        and {
            "run_id": earlier.run_id,
            "status": earlier.status,
            "restored": [unit.manifest.name for unit in earlier.units],
            "damaged": list(earlier.damaged),
            "measured": [],
        },
    }


def _provenance(folder: RunFolder) -> dict[str, Any]:
    git, fingerprint = provenance.git_state(project.root()), hardware.fingerprint()
    folder.write_json("environment.json", provenance.environment())
    folder.write_json("hardware.json", fingerprint)
    folder.write_json("git.json", git.as_record())
    if git.patch:
        folder.write("patch.diff", git.patch)
    return {
        "p99lab": importlib.metadata.version("p99lab"),
        "revision": git.revision,
        "dirty": git.is_dirty,
        "hardware": hardware.label(fingerprint),
    }


def _code(notebook: Path) -> dict[str, str]:
    """Digests of the run's code; none of code that is not plain Python (`%magic`), or no notebook: it may yet run."""
    try:
        return sources.digests(notebook)
    except (ValueError, KeyError, SyntaxError):
        return {}


def _rules(notebook: str) -> dict[str, str]:
    return {claim.id: rule_digest(claim) for claim in load_claims() if claim.notebook == notebook}
