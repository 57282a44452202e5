"""Who may import whom, read from the source and, for the base install, from what an import really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.light

LIB = Path(__file__).resolve().parents[1] / "lib"
LAYERS = ("caches", "engine", "serving", "probe", "lab")  # each may import itself and what stands left of it
ASIDE = ("isolation", "observe")  # import none of the layers
ON_TOP = ("commands", "cli")  # import anything
NEUTRAL = ("errors", "strict", "project")  # import nothing of the package but each other
CONTROL_PLANE = {  # of the caches and the engine all modules that never reach TENSORS
    "caches",
    *(f"engine.{name}" for name in ("request", "config", "policy", "grouping", "scheduler", "plan", "timekeeping")),
    *(f"engine.{name}" for name in ("costs", "composition", "admission", "accounts", "scheduler_output", "filling")),
    *(f"engine.{name}" for name in ("dealing", "step_price", "pace", "pipeline", "outputs", "events", "stats")),
    *(f"engine.{name}" for name in ("geometry", "reconfiguring", "prompts", "tokenizer", "output_text")),
    *(f"engine.{name}" for name in ("lifetime", "turns", "interrupts", "interpreter")),
    *(f"engine.attention.{name}" for name in ("spans", "lanes", "lists", "page_tables", "shape")),
}
TENSORS = {"torch", "transformers", "triton"}
BASE_LAB = [
    *("parameters", "run_folder", "figures", "claims", "ledger", "sources", "staleness", "effects", "decisions"),
    *("runs", "inspection", "compare", "index", "publish", "doctor", "units", "resume", "secrets"),
]
BASE_INSTALL = (
    "cli",
    "commands",
    "probe",
    *(f"serving.{name}" for name in ("process", "options", "child")),
    *(f"lab.{name}" for name in BASE_LAB),
)
HEAVY = (
    "torch",
    "transformers",
    "pandas",
    "matplotlib",
    "seaborn",
    "duckdb",
    "grpc",
    "papermill",
    "nbformat",
    "fastapi",
    "uvicorn",
)


def modules() -> dict[str, Path]:
    """Dotted name below p99lab → file; the package itself is ''."""
    found = {}
    for path in sorted((LIB / "p99lab").rglob("*.py")):
        parts = path.relative_to(LIB / "p99lab").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def imported(path: Path, *, at_import_only: bool = False) -> tuple[str, ...]:
    """Absolute names that a module imports anywhere, or only those that run when it is imported."""
    return tuple(_imported(path, at_import_only))


def _imported(path: Path, at_import_only: bool) -> Iterator[str]:
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if at_import_only and (is_function(node) or is_for_the_type_checker(node)):
            continue
        pending.extend(ast.iter_child_nodes(node))


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_for_the_type_checker(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def own_modules(path: Path, *, at_import_only: bool = False) -> set[str]:
    """The modules of p99lab that a module imports; `from p99lab.a import B` is p99lab.a unless a.B is a module."""
    found = set()
    for name in imported(path, at_import_only=at_import_only):
        head, _, rest = name.partition(".")
        if head == "p99lab" and rest:
            found.add(rest if rest in MODULES else rest.rpartition(".")[0])
    return found


def part(module: str) -> str:
    return module.partition(".")[0]


def is_control_plane(module: str) -> bool:
    return module in CONTROL_PLANE or part(module) in CONTROL_PLANE


def allowed(importer: str) -> set[str]:
    own = part(importer)
    if own in NEUTRAL:
        return set(NEUTRAL)
    if own in ASIDE:
        return {own, *NEUTRAL}
    if own in LAYERS:
        beside = ASIDE if own in ("serving", "probe", "lab") else ()
        return {*LAYERS[: LAYERS.index(own) + 1], *beside, *NEUTRAL}
    return {part(module) for module in MODULES} if own in ON_TOP else set(NEUTRAL)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    wrong = {name for name in own_modules(MODULES[module]) if name and part(name) not in allowed(module)}
    assert not wrong, f"p99lab.{module} may not import {sorted(wrong)}"


def test_every_module_has_a_layer() -> None:
    assert {part(module) for module in MODULES} <= {"", *ON_TOP, *LAYERS, *ASIDE, *NEUTRAL}


def test_no_import_cycles() -> None:
    graph = {module: own_modules(path, at_import_only=True) - {module, ""} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def tensors_through(module: str) -> str | None:
    """The module that imports what the control plane must not reach: this one, or one that it imports."""
    reached, pending = set(), [module]
    while pending:
        name = pending.pop()
        if name in reached or name not in MODULES:
            continue
        reached.add(name)
        if TENSORS & {full.partition(".")[0] for full in imported(MODULES[name])}:
            return name
        pending.extend(own_modules(MODULES[name]))
    return None


@pytest.mark.parametrize("module", [m for m in MODULES if is_control_plane(m)])
def test_control_plane_never_imports_torch(module: str) -> None:
    through = tensors_through(module)
    assert through is None, f"p99lab.{module} reaches torch through p99lab.{through}"


@pytest.mark.parametrize("module", [m for m in MODULES if part(m) in ("caches", "engine") and not is_control_plane(m)])
def test_what_is_not_called_control_plane_imports_torch(module: str) -> None:
    is_empty = not MODULES[module].read_text(encoding="utf-8")  # a package's own
    assert is_empty or tensors_through(module), f"add p99lab.{module} to CONTROL_PLANE"


def test_every_name_in_the_control_plane_is_a_module() -> None:
    assert set(MODULES) >= CONTROL_PLANE


def test_base_install_imports_nothing_heavy() -> None:
    """Importing these loads none of the extras, which the base install does not have."""
    names = [f"p99lab.{module}" for module in MODULES if any(f"{module}.".startswith(f"{b}.") for b in BASE_INSTALL)]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
