from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import SecretStr

from p99lab import project
from p99lab.errors import BadParameterError
from p99lab.lab.parameters import CONTRACTS, Contract, check, digest, find, load, plain
from p99lab.strict import StrictModel

pytestmark = pytest.mark.light


class Fields(StrictModel):
    documents: int
    rate: float
    label: str
    arms: tuple[str, ...]
    loads: tuple[Literal["closed", "open"], ...]
    deadline_s: float | None
    note: str | None
    primed: bool


FIELDS = Contract("05_fields", Fields)
BASE = """
documents: 8
rate: 0.5
label: 12e4567
arms: [stock, 12e4567]
loads: [closed]
deadline_s: null
note: null
primed: true
"""


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    (tmp_path / "smoke.yaml").write_text(BASE)
    (tmp_path / "laptop.yaml").write_text(BASE)
    return tmp_path


def test_a_tier_is_read_by_its_fields_types(tiers: Path) -> None:
    fields = load(FIELDS, "smoke", folder=tiers)
    assert fields == Fields(
        documents=8,
        rate=0.5,
        label="12e4567",
        arms=("stock", "12e4567"),
        loads=("closed",),
        deadline_s=None,
        note=None,
        primed=True,
    )


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("label=12e4567", "label", "12e4567"),
        ("label=010", "label", "010"),
        ("label=yes", "label", "yes"),
        ("label=a: b", "label", "a: b"),
        ("label=", "label", ""),
        ("note=[x", "note", "[x"),
        ("note=null", "note", None),
        ("documents=010", "documents", 10),
        ("rate=1e3", "rate", 1000.0),
        ("deadline_s=2.5", "deadline_s", 2.5),
        ("deadline_s=null", "deadline_s", None),
        ("primed=false", "primed", False),
        ("arms=[stock, 12e4567, 010]", "arms", ("stock", "12e4567", "010")),
        ("loads=[open, closed]", "loads", ("open", "closed")),
    ],
)
def test_an_override_is_what_the_field_says(tiers: Path, override: str, name: str, value: object) -> None:
    got = getattr(load(FIELDS, "smoke", [override], tiers), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("documnets=3", "did you mean 'documents'?"),
        ("documents=12e4567", "documents"),
        ("documents=2.5", "documents"),
        ("documents=0x10", "documents"),
        ("rate=inf", "rate"),
        ("rate=12e4567", "rate"),
        ("rate=nan", "rate"),
        ("primed=perhaps", "primed"),
        ("loads=[shut]", "loads"),
        ("arms=[a", "arms: not valid YAML"),
        ("documents", "'documents' is not name=value"),
        ("arms=stock", "arms takes a list: 'arms=[stock]'"),
    ],
)
def test_an_override_that_does_not_fit_is_one_line(tiers: Path, override: str, says: str) -> None:
    with pytest.raises(BadParameterError) as caught:
        load(FIELDS, "smoke", [override], tiers)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_that_is_repeated_is_refused(tiers: Path) -> None:
    with pytest.raises(BadParameterError, match=r"^rate is given more than once$"):
        load(FIELDS, "smoke", ["rate=1", "documents=3", "rate=2"], tiers)


def test_a_tier_gives_every_parameter_and_no_other(tiers: Path) -> None:
    (tiers / "smoke.yaml").write_text("documents: 8\nlabels: x\n")
    with pytest.raises(BadParameterError, match=r"rate.*unknown parameter 'labels'; did you mean 'label'"):
        load(FIELDS, "smoke", folder=tiers)


@pytest.mark.parametrize("content", ["", "- a\n", "just text"])
def test_a_tier_file_that_is_no_mapping(tiers: Path, content: str) -> None:
    (tiers / "smoke.yaml").write_text(content)
    with pytest.raises(BadParameterError, match=r"05_fields/smoke\.yaml"):
        load(FIELDS, "smoke", folder=tiers)


def test_an_unknown_tier_names_the_nearest_or_all(tiers: Path) -> None:
    with pytest.raises(BadParameterError, match="did you mean 'smoke'"):
        load(FIELDS, "smok", folder=tiers)
    with pytest.raises(BadParameterError, match="there are laptop, smoke"):
        load(FIELDS, "h200", folder=tiers)


KNOWN = {name: Contract(name, Fields) for name in ("00_environment", "02_1_kv_growth", "02_2_decode", "04_2_isolation")}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("00", "00_environment"),
        ("environment", "00_environment"),
        ("env", "00_environment"),
        ("02_1", "02_1_kv_growth"),
        ("kv", "02_1_kv_growth"),
        ("04_2_isolation", "04_2_isolation"),
    ],
)
def test_a_notebook_goes_by_number_or_slug(name: str, meant: str) -> None:
    assert find(name, KNOWN).notebook == meant


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("02", "'02' may be any of 02_1_kv_growth, 02_2_decode"),
        ("enviroment", "did you mean 'environment'"),
        ("00_enviroment", "did you mean '00_environment'"),
        ("77", "there are 00_environment"),
        ("", "there are 00_environment"),
    ],
)
def test_a_notebook_that_is_not_meant_clearly(name: str, says: str) -> None:
    with pytest.raises(BadParameterError) as caught:
        find(name, KNOWN)
    assert says in str(caught.value)


def literals() -> dict[str, object]:
    return {
        "documents": 8,
        "rate": 0.5,
        "label": "x",
        "arms": ["stock"],
        "loads": ["open"],
        "deadline_s": None,
        "note": None,
        "primed": True,
    }


def kernel_globals() -> dict[str, object]:
    """What an IPython kernel has in its namespace beside the user's variables."""
    return {"__name__": "__main__", "In": ["", "x"], "Out": {}, "_ih": [""], "_dh": [], "exit": exit, "Path": Path}


def test_check_takes_the_literals_of_the_parameters_cell() -> None:
    known = {"05_fields": FIELDS}
    assert check("05_fields", kernel_globals() | literals(), known) == Fields.parse(literals())


@pytest.mark.parametrize("extra", ["documnets", "something_else"])
def test_check_refuses_a_literal_that_is_no_parameter(extra: str) -> None:
    with pytest.raises(BadParameterError, match=f"unknown parameter '{extra}'"):
        check("05_fields", kernel_globals() | literals() | {extra: 3}, {"05_fields": FIELDS})


def test_check_again_leaves_later_variables_alone_but_not_near_misses() -> None:
    known = {"05_fields": FIELDS}
    later = kernel_globals() | literals() | {"parameters": Fields.parse(literals()), "total": 3}
    assert check("05_fields", later, known) == Fields.parse(literals())
    with pytest.raises(BadParameterError, match="did you mean 'documents'"):
        check("05_fields", later | {"documnets": 3}, known)


def test_check_names_what_is_missing_or_does_not_fit() -> None:
    wrong = literals() | {"rate": float("inf")}
    del wrong["label"]
    with pytest.raises(BadParameterError, match=r"rate: .*finite.*label: Field required"):
        check("05_fields", wrong, {"05_fields": FIELDS})


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
def test_every_tier_of_every_notebook_fits(contract: Contract) -> None:
    tiers = {path.stem for path in (project.params_dir() / contract.notebook).glob("*.yaml")}
    assert {"smoke", "laptop"} <= tiers <= {"smoke", "laptop", "h200"}
    for tier in tiers:
        assert isinstance(load(contract, tier), contract.parameters)


@pytest.mark.parametrize("what", ["document", "question", "answer"])
def test_a_range_the_wrong_way_round_is_refused_before_a_kernel(what: str) -> None:
    with pytest.raises(BadParameterError, match=rf"^{what}_tokens_max: \d+ is below {what}_tokens_min=3000$") as caught:
        load(CONTRACTS["01_headline_p99"], "laptop", [f"{what}_tokens_min=3000"])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("given", ["vllm_site", "vllm_model"])
def test_a_peers_folders_go_together(given: str) -> None:
    with pytest.raises(BadParameterError, match="vllm_site and vllm_model go together"):
        load(CONTRACTS["01_headline_p99"], "laptop", [f"{given}=/somewhere"])


# --- secrets --------------------------------------------------------------------------------------------------------


class Guarded(StrictModel):
    url: str
    api_key: SecretStr
    password: SecretStr | None = None


GUARDED = Contract("06_guarded", Guarded)
VALUE = "correct horse"


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "smoke.yaml").write_text("url: http://127.0.0.1\n")
    monkeypatch.setenv("P99LAB_SECRET_API_KEY", VALUE)
    return tmp_path


def test_a_secret_comes_from_the_environment_and_is_written_nowhere(guarded: Path) -> None:
    given = load(GUARDED, "smoke", folder=guarded)
    assert isinstance(given, Guarded)
    assert given.api_key.get_secret_value() == VALUE
    assert given.password is None
    assert plain(given) == {"url": "http://127.0.0.1", "api_key": "(secret)", "password": None}
    assert VALUE not in repr(given)


def test_another_secret_is_no_other_run(guarded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(GUARDED, "smoke", folder=guarded)
    monkeypatch.setenv("P99LAB_SECRET_API_KEY", "battery staple")
    assert digest(load(GUARDED, "smoke", folder=guarded)) == digest(before)
    assert digest(load(GUARDED, "smoke", ["url=http://other"], guarded)) != digest(before)


@pytest.mark.parametrize("where", ["command line", "tier file", "notebook"])
def test_a_secret_that_is_written_down_is_refused(guarded: Path, where: str) -> None:
    if where == "tier file":
        (guarded / "smoke.yaml").write_text(f"url: x\napi_key: {VALUE}\n")
    written = {"url": "x", "api_key": VALUE, "password": None}
    readers = {
        "command line": lambda: load(GUARDED, "smoke", [f"api_key={VALUE}"], guarded),
        "tier file": lambda: load(GUARDED, "smoke", folder=guarded),
        "notebook": lambda: check("06_guarded", written, {"06_guarded": GUARDED}),
    }
    with pytest.raises(BadParameterError, match=r"api_key is secret .*put it into \$P99LAB_SECRET_API_KEY") as caught:
        readers[where]()
    assert VALUE not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_secret_that_is_not_set_is_asked_for(guarded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("P99LAB_SECRET_API_KEY")
    with pytest.raises(BadParameterError, match=r"api_key is secret and not set: put it into \$P99LAB_SECRET_API_KEY"):
        load(GUARDED, "smoke", folder=guarded)


def test_check_fills_in_what_the_runner_injected_as_secret(guarded: Path) -> None:
    injected = {"url": "x", "api_key": "(secret)", "password": None}
    found = check("06_guarded", injected, {"06_guarded": GUARDED})
    assert isinstance(found, Guarded)
    assert found.api_key.get_secret_value() == VALUE
    with pytest.raises(BadParameterError, match=r"\$P99LAB_SECRET_PASSWORD"):
        check("06_guarded", {**injected, "password": "(secret)"}, {"06_guarded": GUARDED})
