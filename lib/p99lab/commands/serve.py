"""`p99lab serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from p99lab.commands.console import needs_extra

if TYPE_CHECKING:
    from p99lab.serving.options import Ready


def serve(
    model: Annotated[str, typer.Argument(help="A name of `p99lab models list`, or a directory.")] = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 2048,
    num_pages: Annotated[int | None, typer.Option(help="Pages of the KV pool. [default: as memory allows]")] = None,
    max_num_waiting: Annotated[int, typer.Option(help="Requests that may wait; further ones get 429.")] = 256,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Compute every prompt whole.")] = False,
    composition: Annotated[str, typer.Option(help="chunked or stock.")] = "chunked",
    policy: Annotated[str, typer.Option(help="Who comes first: fcfs, priority or deadline.")] = "fcfs",
    max_step_s: Annotated[
        float | None,
        typer.Option(help="Seconds that a step may take while requests decode; on devices with known costs."),
    ] = None,
    attention: Annotated[str, typer.Option(help="auto, flashinfer (Hopper GPUs) or reference.")] = "auto",
    no_graphs: Annotated[bool, typer.Option("--no-graphs", help="Launch every kernel of a step by itself.")] = False,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the key clients must show.")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests to finish at the end.")] = 30.0,
    gateways: Annotated[int, typer.Option(help="Processes for HTTP, JSON and text.")] = 1,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
) -> None:
    """Serve a model through the OpenAI API: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

    Of several gateways any one answers /metrics and /health, and says which. What it has itself counted and timed
    carries gateway="N", to be summed over all N; the engine's figures are the same from each.

    One line on stdout says when it is ready. SIGTERM or Ctrl-C: no new requests, running ones finish; twice: at once.
    Exit code 2: a parameter that does not fit, or an address in use; 4: a model that cannot be used.
    """
    from p99lab.serving.options import ServeOptions

    options = ServeOptions.parse(
        {
            "model": model,
            "served_model_name": served_model_name,
            "host": host,
            "port": port,
            "device": device,
            "dtype": dtype,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_pages": num_pages,
            "max_num_waiting": max_num_waiting,
            "prefix_cache": not no_prefix_cache,
            "composition": composition,
            "policy": policy,
            "max_step_s": max_step_s,
            "attention": attention,
            "graphs": not no_graphs,
            "api_key_env": api_key_env,
            "drain_timeout": drain_timeout,
            "gateways": gateways,
        }
    )
    with needs_extra("serve", "p99lab serve"):
        from p99lab.serving import foreground
        from p99lab.serving import gateways as gateway_processes

        gateway_processes.require_packages()
    with needs_extra("engine", "p99lab serve"):
        foreground.serve(options, _announce)


def _announce(ready: Ready) -> None:
    if ready.is_exposed:
        typer.echo("p99lab: other machines can use this server without a key: --api-key-env asks for one", err=True)
    typer.echo(str(ready))
