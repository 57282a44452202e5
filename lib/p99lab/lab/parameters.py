"""What each notebook takes and what it owes: one parameter model and one list of deliverables per notebook.

The runner validates a run's parameters here before a kernel starts; the notebook calls `check` right
after its parameters, so that values changed by hand in JupyterLab are held to the same model.

A parameter typed `SecretStr` takes its value from `$P99LAB_SECRET_<NAME>` and from nowhere else; wherever parameters
are written, `(secret)` stands for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from p99lab import project
from p99lab.errors import BadParameterError, did_you_mean
from p99lab.lab import secrets
from p99lab.strict import StrictModel

_LITERALS = (bool, int, float, str, list, tuple, dict, type(None))


class Environment00(StrictModel):
    """Sizes of the measurements in `00_environment`."""

    buffer_mib: int = Field(ge=1)  # memory moved at a time; far beyond the last-level cache
    matmul_size: int = Field(ge=16)  # rows and columns of the square matrices
    disk_mib: int = Field(ge=1)
    launches: int = Field(ge=1)  # tiny GPU kernels per timing
    repeats: int = Field(ge=1)


ArmName = Literal[
    "no cache",
    "stock",
    "+chunked",
    "+shared-prefix groups",
    "+graphs and overlap",
    "+tiers and warm-up",
    "+isolation and priority",
    "vLLM",
]
Share = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Span = tuple[int, int]


class Headline01(StrictModel):
    """The headline scenario's sizes; lengths in tokens. Tiers differ in these numbers and in nothing else.

    What is left out (an arm, an empty tuple of shares or rates, no cold documents) reads `not run`: so a publication
    can be measured in several commands, each with `stock` among its arms.
    """

    model: str  # a name of `p99lab models list`, a directory, or dummy:<geometry>
    dtype: Literal["float32", "bfloat16", "float16"]
    device: str
    threads: int = Field(ge=0)  # of torch on a CPU; 0 leaves one of its own choice to the clients
    transport: Literal["in-process", "http"]  # clients in the engine's process, or in one of their own
    random_tokens: int | None = Field(None, ge=2)  # documents of random ids of this vocabulary, for random weights
    tokenizer: str | None  # a model or folder whose tokenizer makes ids of text; not on this machine: random_tokens
    exact_lengths: tuple[int, int, int] | None  # of every document, question and answer, instead of drawn ones
    num_documents: int = Field(ge=1)
    document_tokens_min: int = Field(ge=1)
    document_tokens_max: int = Field(ge=1)
    question_tokens_min: int = Field(ge=1)
    question_tokens_max: int = Field(ge=1)
    answer_tokens_min: int = Field(ge=1)
    answer_tokens_max: int = Field(ge=1)
    arms: tuple[ArmName, ...] | None  # None: all that can be measured here
    concurrency: int = Field(ge=1)  # clients of the closed load
    clients_without_cache: int = Field(ge=1)  # of the closed load of `no cache`
    max_num_seqs: int = Field(ge=1)
    chunk_tokens: int = Field(ge=1)  # prompt and decode tokens of a step, from `+chunked` on
    max_step_s: float | None = Field(gt=0)  # predicted, of a step that decodes: prompts get fewer tokens; likewise
    max_hold_s: float = Field(ge=0)  # that company for a document is waited for, from `+shared-prefix groups` on
    requests_for_p99: int = Field(ge=1)  # closed, for `stock` and the full set; a P99 needs 368
    requests_for_p90: int = Field(ge=1)  # closed, for the arms between them; a P90 needs 36
    requests_without_cache: int = Field(ge=1)  # closed, for `no cache`
    warmup_requests: int = Field(ge=0)  # closed, for `stock` and the full set, before anything is measured
    num_blocks: int = Field(ge=1)  # an arm's requests are spread over as many blocks
    block_s: float | None = Field(gt=0)  # of a closed block, instead of a number of requests
    open_requests: int = Field(ge=0)  # 0 leaves the open load at a rate common to all arms out
    open_share: Share  # of what `stock` answers per second under the closed load
    open_arms: tuple[ArmName, ...] | None  # of `stock`, the full set and vLLM: who gets open loads; None: all three
    open_block_requests: int = Field(ge=0)  # open loads below last longer at rates too low for as many; P99 needs 368
    open_shares: tuple[tuple[Share, Seconds], ...]  # Poisson, of what the arm answers under the closed load, so long
    bursty_shares: tuple[tuple[Share, Seconds], ...]  # gamma arrivals (CV 2), likewise
    open_rates: tuple[tuple[Rate, Seconds], ...]  # Poisson arrivals per second, up to the arm's capacity, for so long
    churn_share: Share  # Poisson arrivals beside cold documents, of what the arm itself answers
    cold_documents: int = Field(ge=0)  # that arrive during it; 0 leaves it out
    cold_every_s: float = Field(gt=0)
    vllm_site: str | None  # the folder that vLLM is installed in (`pip install --target`)
    vllm_model: str | None  # the folder of its config and tokenizer
    vllm_arguments: tuple[str, ...]  # what its server is started with besides
    max_measuring_s: float = Field(gt=0)  # of all blocks together; each gets a share and ends with it
    slo_p99_s: float = Field(gt=0)  # of E2E under the open load
    seed: int = Field(ge=0)

    @field_validator("document_tokens_max", "question_tokens_max", "answer_tokens_max")
    @classmethod
    def _not_below_its_min(cls, most: int, info: ValidationInfo) -> int:
        name = str(info.field_name).replace("_max", "_min")
        if most < info.data.get(name, most):
            raise ValueError(f"{most} is below {name}={info.data[name]}")
        return most

    @field_validator("exact_lengths")
    @classmethod
    def _at_least_a_token(cls, lengths: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if lengths is not None and min(lengths) < 1:
            raise ValueError("a document, a question and an answer have at least 1 token each")
        return lengths

    @field_validator("arms")
    @classmethod
    def _are_some(cls, arms: tuple[ArmName, ...] | None) -> tuple[ArmName, ...] | None:
        if arms is not None and len(set(arms)) < max(1, len(arms)):
            raise ValueError("name at least one arm, and each once")
        return arms

    @field_validator("vllm_model")
    @classmethod
    def _beside_a_site(cls, model: str | None, info: ValidationInfo) -> str | None:
        if (model is None) != (info.data.get("vllm_site") is None):
            raise ValueError("vllm_site and vllm_model go together")
        return model

    @property
    def lengths(self) -> tuple[Span, Span, Span]:
        """The least and most tokens of documents, of questions, and of answers."""
        if self.exact_lengths is not None:
            document, question, answer = self.exact_lengths
            return (document, document), (question, question), (answer, answer)
        return (
            (self.document_tokens_min, self.document_tokens_max),
            (self.question_tokens_min, self.question_tokens_max),
            (self.answer_tokens_min, self.answer_tokens_max),
        )

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


class Ledger99(StrictModel):
    """What `99_ledger` reads: the runs below a folder, the project's own `outputs/` when it is not given."""

    outputs: str | None = None


@dataclass(frozen=True)
class Contract:
    """One notebook's side of a run: its parameter model, and the files it owes relative to the run folder.

    `gpu_tiers`: those that take an NVIDIA GPU though no parameter says so.
    """

    notebook: str
    parameters: type[StrictModel]
    deliverables: tuple[str, ...] = ()
    gpu_tiers: tuple[str, ...] = ()


CONTRACTS: Mapping[str, Contract] = MappingProxyType(
    {
        contract.notebook: contract
        for contract in (
            Contract(
                "00_environment",
                Environment00,
                (
                    "metrics/fingerprint.json",
                    "metrics/ceilings.parquet",
                    "metrics/capabilities.parquet",
                    "metrics/summary.parquet",
                    "figures/roofline.png",
                ),
                gpu_tiers=("h200",),
            ),
            Contract(
                "01_headline_p99",
                Headline01,
                (
                    "metrics/arms.parquet",
                    "metrics/requests.parquet",
                    "metrics/coverage.parquet",
                    "metrics/summary.parquet",
                    "metrics/goodput.parquet",
                    "metrics/churn.parquet",
                    "metrics/bars.parquet",
                    "metrics/ratios.parquet",
                    "metrics/percentiles.parquet",
                    "metrics/attribution.parquet",
                    "metrics/hit_rates.parquet",
                    "metrics/windows.parquet",
                    "metrics/figures.parquet",
                    "metrics/effects.parquet",
                    "metrics/claims.parquet",
                    "figures/ablation.png",
                    "figures/ecdf.png",
                    "figures/timeline.png",
                    "figures/attribution.png",
                ),
            ),
            Contract(
                "99_ledger",
                Ledger99,
                (
                    "metrics/ledger.parquet",
                    "metrics/inconsistencies.parquet",
                    "metrics/decisions.parquet",
                    "metrics/summary.parquet",
                    "figures/ledger.png",
                ),
            ),
        )
    }
)


def find(name: str, known: Mapping[str, Contract] = CONTRACTS) -> Contract:
    """The contract meant by a notebook's number, its slug, or the beginning of either.

    Raises:
        BadParameterError: no notebook, or more than one, goes by that name.
    """
    if name in known:
        return known[name]
    matches = [key for key in known if key.startswith(name) or _slug(key).startswith(name)] if name else []
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        raise BadParameterError(f"'{name}' may be any of {', '.join(matches)}")
    raise BadParameterError(f"no notebook '{name}'{_nearest_or_all(name, [*known, *map(_slug, known)], known)}")


def load(contract: Contract, tier: str, overrides: Sequence[str] = (), folder: Path | None = None) -> StrictModel:
    """The parameters of one run: a tier's file, with `name=value` overrides on top.

    All values are read as text and converted by the field they are meant for, so that `12e4567` stays a string where
    a string is wanted and a number is never guessed. A tier file gives every parameter that is not secret.

    Raises:
        BadParameterError: the tier or a parameter does not exist, a value does not fit, or a secret is not where it
            belongs.
    """
    file = tier_file(contract, tier, folder)
    values = _read_yaml(file.read_text(), f"{contract.notebook}/{file.name}")
    if not isinstance(values, dict):
        raise BadParameterError(f"{contract.notebook}/{file.name} is not a list of 'name: value' lines")
    fields = contract.parameters.model_fields
    resolved = {name: _nothing_or(value, fields.get(name)) for name, value in values.items()}
    return parse(contract.parameters, {**resolved, **given(contract.parameters, overrides)})


def given(model: type[StrictModel], overrides: Sequence[str]) -> dict[str, Any]:
    """`name=value` texts as values for a model, not yet validated.

    Raises:
        BadParameterError: a text is not of that form, or a name is given twice.
    """
    values: dict[str, Any] = {}
    for name, value in (_override(text, model) for text in overrides):
        if name in values:
            raise BadParameterError(f"{name} is given more than once")
        values[name] = value
    return values


def parse(model: type[StrictModel], values: Mapping[str, Any]) -> StrictModel:
    """Parameters from plain values, the secret ones from the environment.

    Raises:
        BadParameterError: a value does not fit; a secret was written down, or is not in the environment.
    """
    return model.parse({**values, **_secret_values(model, values)})


def plain(parameters: StrictModel) -> dict[str, Any]:
    """Parameters as they are written into records and notebooks, `(secret)` in place of a secret."""
    values = parameters.model_dump(mode="json")
    return {
        name: secrets.SHOWN if isinstance(getattr(parameters, name), SecretStr) else values[name] for name in values
    }


def digest(parameters: StrictModel) -> str:
    """One digest of all parameters that are not secret."""
    return hashlib.blake2b(json.dumps(plain(parameters), sort_keys=True).encode(), digest_size=16).hexdigest()


def tier_file(contract: Contract, tier: str, folder: Path | None = None) -> Path:
    """The file of a tier.

    Raises:
        BadParameterError: there is none.
    """
    folder = folder if folder is not None else project.params_dir() / contract.notebook
    if not (file := folder / f"{tier}.yaml").is_file():
        tiers = sorted(path.stem for path in folder.glob("*.yaml"))
        raise BadParameterError(f"no tier '{tier}' for {folder.name}{_nearest_or_all(tier, tiers, tiers)}")
    return file


def tier_digest(notebook: str, tier: str, known: Mapping[str, Contract] = CONTRACTS) -> str:
    """One digest of a tier's file as it is.

    Raises:
        BadParameterError: there is none.
    """
    return hashlib.blake2b(tier_file(find(notebook, known), tier).read_bytes(), digest_size=16).hexdigest()


def check(notebook: str, namespace: Mapping[str, Any], known: Mapping[str, Contract] = CONTRACTS) -> StrictModel:
    """Validate the literals of a notebook's parameters cell: call it with `globals()` right after that cell.

    A literal that is no parameter is refused. Once the notebook has gone further (this cell runs again), later cells'
    variables are their own business, and only a near miss of a parameter's name is refused.

    Raises:
        BadParameterError: a parameter is unknown, missing or does not fit.
    """
    model = find(notebook, known).parameters
    literals = {name: value for name, value in namespace.items() if _is_literal(name, value)}
    if any(isinstance(value, model) for value in namespace.values()):
        fields = model.model_fields
        literals = {name: value for name, value in literals.items() if name in fields or did_you_mean(name, fields)}
    return parse(model, literals)


def _slug(notebook: str) -> str:
    """`02_1_kv_growth` → `kv_growth`."""
    return notebook.lstrip("0123456789_")


def _nearest_or_all(wrong: str, near: Iterable[str], everything: Iterable[str]) -> str:
    return did_you_mean(wrong, near) or f"; there are {', '.join(everything)}"


def _read_yaml(text: str, where: str) -> Any:
    """YAML whose scalars all stay text."""
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise BadParameterError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _override(text: str, model: type[StrictModel]) -> tuple[str, Any]:
    name, equals, raw = text.partition("=")
    if not equals:
        raise BadParameterError(f"'{text}' is not name=value")
    field = model.model_fields.get(name)
    value = _nothing_or(raw if str in _choices(field) else _read_yaml(raw, name), field)
    if isinstance(value, str) and any(typing.get_origin(choice) is tuple for choice in _choices(field)):
        raise BadParameterError(f"{name} takes a list: '{name}=[{raw}]'")
    return name, value


def _nothing_or(value: Any, field: FieldInfo | None) -> Any:
    """None for a written null where the field takes None; anything else as it is."""
    return None if type(None) in _choices(field) and value in ("~", "null", "none", "None") else value


def _choices(field: FieldInfo | None) -> tuple[Any, ...]:
    """The types a field takes: the members of its union, or the one."""
    if field is None:
        return ()
    is_union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    return typing.get_args(field.annotation) if is_union else (field.annotation,)


def _secret_values(model: type[StrictModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The secret parameters, already wrapped, so that no message about them shows their values."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if SecretStr not in _choices(field):
            continue
        variable = secrets.variable(name)
        if values.get(name, secrets.SHOWN) not in (secrets.SHOWN, None):
            raise BadParameterError(f"{name} is secret and must not be written down: put it into ${variable}")
        if variable in os.environ:
            found[name] = SecretStr(os.environ[variable])
        elif values.get(name, secrets.SHOWN if field.is_required() else None) == secrets.SHOWN:
            raise BadParameterError(f"{name} is secret and not set: put it into ${variable}")
    return found


def _is_literal(name: str, value: Any) -> bool:
    return isinstance(value, _LITERALS) and not name.startswith("_") and name not in ("In", "Out")
