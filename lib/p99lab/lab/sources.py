"""Which files a notebook's figures depend on, and one digest of them: what makes a run stale, or fit to be resumed."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from p99lab import project

PACKAGE = "p99lab"


def digests(notebook: Path) -> dict[str, str]:
    """BLAKE2b of the notebook's code and of every module of the package that it reaches, by name.

    Imports inside functions count, so that it is the code that can run and not the code that did. The notebook's own
    entry covers its code cells, and not its prose, its outputs or its parameters' values.
    """
    cells = _code_cells(notebook)
    found = {notebook.name: _digest("\n\n".join(cells).encode())}
    pending = {name for cell in cells for name in _imported(cell)}
    while pending:
        module = pending.pop()
        if module in found or (path := _file(module)) is None:
            continue
        source = path.read_bytes()
        found[module] = _digest(source)
        pending |= set(_imported(source))
    return dict(sorted(found.items()))


def digest(of: Iterable[tuple[str, str]]) -> str:
    """One digest of several (`digests(…).items()`), whatever their order."""
    return _digest(json.dumps(sorted(of)).encode())


def _code_cells(notebook: Path) -> list[str]:
    """The sources of the code cells, the parameters cell left out."""
    cells = json.loads(notebook.read_bytes())["cells"]
    ran = (c for c in cells if c["cell_type"] == "code" and "parameters" not in c["metadata"].get("tags", ()))
    return ["".join(cell["source"]) for cell in ran]


def _imported(source: str | bytes) -> Iterator[str]:
    """The names below the package that a source imports; `from p99lab.a import b` may name a module or not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(f"{PACKAGE}."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file(module: str) -> Path | None:
    """The file of a module of the package; None for a name that is none, or a package's own (they hold no logic)."""
    root = Path(project.__file__).parent
    path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return path if path.is_file() else None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
