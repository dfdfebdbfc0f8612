"""The knobs of the node programs, named once: python -m prefill_server | decode_server --help.

`disagg up` passes the same names on; docs/operators.md explains how to set them.
"""

import argparse
import re
import secrets
from dataclasses import dataclass

from engine.log_format import LOG_FORMATS
from kvtransfer.plane import PLANES

DEFAULT_COORDINATOR = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What a node was told. Unset values (None) are chosen from the model and the machine."""

    listen: str
    advertise: str | None
    coordinators: list[str]
    node_id: str
    model: str
    dtype: str
    device: str
    threads: int
    kv_memory_gb: float | None
    block_size: int
    max_model_len: int | None
    max_running: int
    step_budget_ms: float
    plane: str
    prefix_cache: str
    drain_grace_s: float
    metrics_listen: str | None
    log_format: str
    exit_with_parent: bool


def parse_knobs(role: str, *, argv: list[str] | None = None) -> NodeConfig:
    """Reads the command line; exits with status 2 and one line about what is wrong with it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {role}_server",
        description=f"A {role} node of disagg: loads a model, registers with its coordinators.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--listen",
        type=address,
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="where to serve; port 0 is any free port",
    )
    add(
        "--advertise",
        type=address,
        metavar="HOST:PORT",
        help="the address that coordinators and peers dial (default: the bound one)",
    )
    add(
        "--coordinator",
        type=address,
        metavar="HOST:PORT",
        action="append",
        dest="coordinators",
        help=f"whom to register with; repeatable (default: {DEFAULT_COORDINATOR})",
    )
    add(
        "--node-id",
        metavar="NAME",
        default=None,
        help="name of this node in the cluster (default: role and random digits)",
    )
    add(
        "--model",
        default="smollm2-135m",
        help="catalogue name, folder, .gguf file or hub id; 'emulated' computes nothing",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of weights and KV; float32 is exact across all ways to serve a request",
    )
    add(
        "--device",
        type=_device,
        default="cpu",
        help="where the model and its KV are: cpu, cuda, cuda:1",
    )
    add(
        "--threads",
        type=_positive_int,
        default=1,
        help="compute threads; two nodes on one machine must not share cores",
    )
    add(
        "--kv-memory-gb",
        type=_positive_float,
        metavar="GB",
        help="size of the KV pool (default: a fifth of the memory that is available, on a GPU "
        "what the weights leave free, less a tenth)",
    )
    add("--block-size", type=_positive_int, default=16, help="tokens per KV block")
    add(
        "--max-model-len",
        type=_positive_int,
        metavar="TOKENS",
        help="longest prompt plus output (default: the model's)",
    )
    add(
        "--plane",
        choices=("auto", *PLANES),
        default="auto",
        help="what carries KV between nodes; auto is nccl between GPUs, gloo between CPU nodes of "
        "one host, else grpc",
    )
    add(
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="keep blocks after their request, for requests that begin with the same tokens",
    )
    add(
        "--drain-grace-s",
        type=_positive_float,
        default=5.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM or a drain; then they move",
    )
    add("--max-running", type=_positive_int, default=64, help="most requests at a time")
    add(
        "--step-budget-ms",
        type=_positive_float,
        default=50.0,
        metavar="MS",
        help="prompt chunks are cut so that a step beside running streams is predicted to last "
        "this long, and a step of prompts alone four times as long",
    )
    add_process_knobs(parser)
    args = parser.parse_args(argv)
    values = vars(args)
    if args.listen.startswith(("0.0.0.0:", "[::]:")) and args.advertise is None:
        parser.error("--advertise: needed with a --listen that is no address to dial")
    values["coordinators"] = values["coordinators"] or [DEFAULT_COORDINATOR]
    values["node_id"] = values["node_id"] or f"{role}-{secrets.token_hex(3)}"
    return NodeConfig(**values)


def add_process_knobs(parser: argparse.ArgumentParser) -> None:
    """What all programs have: metrics_listen, log_format, exit_with_parent."""
    parser.add_argument(
        "--metrics-listen",
        type=address,
        metavar="HOST:PORT",
        help="where to serve Prometheus metrics over HTTP; port 0 is any free port (default: "
        "nowhere)",
    )
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="of the log on stderr: lines of text, or one JSON object per line",
    )
    parser.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="stop when stdin ends, as it does when the process that started this one is gone",
    )


def address(text: str) -> str:
    """HOST:PORT of a command line."""
    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    return text


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
