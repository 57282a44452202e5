"""`p99lab models`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from p99lab.commands.console import out


def fetch(name: Annotated[str, typer.Argument(help="A name of `p99lab models list`.")]) -> None:
    """Bring a model to this machine's cache, once, and print its directory."""
    from p99lab.engine import model_store

    with out.status(f"fetching {name}") if out.is_terminal else nullcontext():
        directory = model_store.fetch(name)
    out.print(escape(str(directory)))


def list_models(json_output: Annotated[bool, typer.Option("--json", help="As a JSON list.")] = False) -> None:
    """The models that can be named, and which of them are here."""
    from p99lab.engine import model_store

    models = model_store.list_models()
    if json_output:
        out.print_json(data=[asdict(model) for model in models])
        return
    table = Table("name", "state", "parameters", "KV per token", "note", box=None, pad_edge=False)
    for model in models:
        parameters, kib = f"{model.num_parameters / 1e6:,.0f} M", f"{model.kv_bytes_per_token_fp16 / 1024:.1f} KiB"
        table.add_row(model.name, model.state, parameters, kib, model.note)
    out.print(table)
