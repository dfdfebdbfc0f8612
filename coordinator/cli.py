"""The disagg command: declares commands and options; what they do is in the cli_*.py files."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator import cli_cache, cli_cluster, cli_generate, cli_top
from coordinator.client import Client
from coordinator.events import GenerationOptions, Prompt
from coordinator.exits import EPILOG, exit_code_of_errors
from coordinator.render import progress_bars, write_json, write_nodes, write_timeline
from engine import catalog

_ADDRESS = "127.0.0.1:50051"
_ADDRESSES = [_ADDRESS]
_MODEL = "smollm2-135m"

app = typer.Typer(
    help="Disaggregated prefill/decode serving of language models.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_cache.app, name="cache")

Coordinator = Annotated[str, typer.Option(help="Address of the coordinator.")]
Coordinators = Annotated[
    list[str],
    typer.Option(
        "--coordinator", help="Address of the coordinator; repeat it for those that can take over."
    ),
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Smallest set of this mass.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Only the k most likely tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Least share of the likeliest.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Repeats an answer.")]
NumChoices = Annotated[int | None, typer.Option("--n", min=1, help="Answers from one prompt.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")]
Logprobs = Annotated[
    int | None, typer.Option(min=0, help="Log-probabilities, with so many alternatives; --json.")
]
Priority = Annotated[int | None, typer.Option(help="Higher goes first; 0.")]
Tenant = Annotated[str | None, typer.Option(help="Whose share of the queue it takes.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Deadline; the server's: 120 s.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]

Model = Annotated[str, typer.Option(help="Catalogue name, folder, .gguf file or hub id.")]
Dtype = Annotated[str | None, typer.Option(help="Of weights and KV, for example bfloat16.")]
Device = Annotated[str | None, typer.Option(help="Of all nodes: cpu (default), cuda, cuda:1.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Per node; nodes must not share cores. Default: 1.")
]
KvMemory = Annotated[
    float | None, typer.Option("--kv-memory-gb", min=0.001, help="KV cache of each node.")
]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens per KV block.")]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Longest prompt plus output.")]
MaxRunning = Annotated[int | None, typer.Option(min=1, help="Most sequences in one step.")]
StepBudget = Annotated[
    float | None, typer.Option("--step-budget-ms", min=0.1, help="Predicted time of one step.")
]
Plane = Annotated[
    str | None, typer.Option(help="What carries KV: auto (default), grpc, gloo, nccl.")
]
DrainGrace = Annotated[
    float | None, typer.Option("--drain-grace-s", min=0.1, help="For running requests, at a stop.")
]
LocalPrefill = Annotated[
    str | None, typer.Option(help="Whether decode nodes may prefill too: auto (default), never.")
]


@app.command(epilog=EPILOG)
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads stdin.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    n: NumChoices = None,
    stop: Stop = None,
    logprobs: Logprobs = None,
    priority: Priority = None,
    tenant: Tenant = None,
    raw: Annotated[bool, typer.Option("--raw", help="Plain text, no chat template.")] = False,
    as_json: Json = False,
    coordinators: Coordinators = _ADDRESSES,
    timeout_s: Timeout = None,
) -> None:
    """Stream one answer. The text goes to stdout, timing and nodes to stderr."""
    if logprobs is not None and not as_json:
        raise typer.BadParameter("needs --json", param_hint="--logprobs")
    text = sys.stdin.read() if prompt == "-" else prompt
    message: Prompt = text if raw else [{"role": "user", "content": text}]
    options: GenerationOptions = {
        **_sampling(max_tokens, temperature, top_p, top_k, min_p, seed),
        "n": n,
        "stop_strings": stop,
        "logprobs": logprobs,
        "priority": priority,
        "tenant": tenant,
    }
    with exit_code_of_errors(coordinator=" or ".join(coordinators)), Client(coordinators) as client:
        cli_generate.generate(
            client, message, options=options, timeout_s=timeout_s, as_json=as_json
        )


@app.command(epilog=EPILOG)
def chat(
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    coordinators: Coordinators = _ADDRESSES,
    timeout_s: Timeout = None,
) -> None:
    """Talk to the model. Ctrl-C ends an answer, /exit or Ctrl-D the conversation."""
    options = _sampling(max_tokens, temperature, top_p, top_k, min_p, seed)
    with exit_code_of_errors(coordinator=" or ".join(coordinators)), Client(coordinators) as client:
        cli_generate.chat(client, system=system, options=options, timeout_s=timeout_s)


@app.command(epilog=EPILOG)
def nodes(as_json: Json = False, coordinator: Coordinator = _ADDRESS) -> None:
    """List the nodes of a cluster."""
    with exit_code_of_errors(coordinator=coordinator), Client(coordinator) as client:
        found = client.list_nodes()
    if not as_json:
        write_nodes(found)
        return
    for node in found:
        write_json("node", node)


@app.command(epilog=EPILOG)
def top(
    once: Annotated[bool, typer.Option("--once", help="One frame, then exit.")] = False,
    coordinator: Coordinator = _ADDRESS,
) -> None:
    """Watch nodes, queues, KV blocks and rates."""
    with exit_code_of_errors(coordinator=coordinator), Client(coordinator) as client:
        cli_top.run(client, once=once)


@app.command(epilog=EPILOG)
def drain(
    node: Annotated[str, typer.Argument(help="A node's name, as disagg nodes lists it.")],
    coordinator: Coordinator = _ADDRESS,
) -> None:
    """Make a node stop: nothing new, what runs there ends or moves, its process exits."""
    with exit_code_of_errors(coordinator=coordinator), Client(coordinator) as client:
        client.drain_node(node)


@app.command(epilog=EPILOG)
def explain(
    request_id: Annotated[str, typer.Argument(help="A request's id.")],
    as_json: Json = False,
    coordinator: Coordinator = _ADDRESS,
) -> None:
    """Tell what happened to a request that runs or has ended not long ago."""
    with exit_code_of_errors(coordinator=coordinator), Client(coordinator) as client:
        events = client.explain(request_id)
    if not as_json:
        write_timeline(events)
        return
    for event in events:
        write_json("timeline", event)


@app.command(epilog=EPILOG)
def pull(name: Annotated[str, typer.Argument(help="A name from the catalog.")]) -> None:
    """Download a model."""
    with exit_code_of_errors(), progress_bars() as progress:
        folder = catalog.pull(name, progress=progress)
    typer.echo(folder)


@app.command(epilog=EPILOG)
def up(
    prefill: Annotated[int, typer.Option(min=0, help="Prefill nodes; 0: colocated.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 1,
    model: Model = _MODEL,
    listen: Annotated[str, typer.Option(help="Where the coordinator listens.")] = _ADDRESS,
    log_dir: Annotated[
        Path | None, typer.Option(help="A log file per program. Default: all to stderr.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    kv_memory_gb: KvMemory = None,
    block_size: BlockSize = None,
    max_model_len: MaxModelLen = None,
    max_running: MaxRunning = None,
    step_budget_ms: StepBudget = None,
    plane: Plane = None,
    drain_grace_s: DrainGrace = None,
    local_prefill: LocalPrefill = None,
) -> None:
    """Run a cluster on this machine, in the foreground, until Ctrl-C."""
    options = {
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "kv_memory_gb": kv_memory_gb,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_running": max_running,
        "step_budget_ms": step_budget_ms,
        "plane": plane,
        "drain_grace_s": drain_grace_s,
    }
    with exit_code_of_errors():
        # Here it is one line; from the nodes it would be one each, after their start.
        catalog.resolve_model(model, allow_download=False)
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        serving = cli_cluster.up(
            model=model,
            num_prefill=prefill,
            num_decode=decode,
            node_options=options,
            coordinator_options={"local_prefill": local_prefill},
            listen=listen,
            log_dir=log_dir,
        )
        raise typer.Exit(cli_cluster.run_until_signal(serving))


@app.command(epilog=EPILOG)
def demo(model: Model = _MODEL, dtype: Dtype = None, threads: Threads = None) -> None:
    """Download the model where need be, start two nodes, stream an answer, stop them."""
    options = {"dtype": dtype, "threads": threads}
    with exit_code_of_errors():
        with progress_bars() as progress:
            catalog.pull(model, progress=progress)
        raise typer.Exit(
            cli_cluster.run_until_signal(cli_cluster.demo(model=model, options=options))
        )


def _sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
) -> GenerationOptions:
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }


def main() -> None:
    """Entry point of the installed command."""
    app()
