"""python -m coordinator: the front of a cluster."""

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from coordinator.checked_request import MAX_REQUEST_BYTES, ServedLimits
from coordinator.cluster_service import ClusterServicer
from coordinator.generation_service import GenerationServicer
from coordinator.metrics import GenerationMetrics
from coordinator.node_channels import NodeChannels
from coordinator.queue import PairingQueue
from coordinator.registry import Registry
from coordinator.tokenizer import ModelTokenizer
from coordinator.waiting_line import MAX_WAITING, MAX_WAITING_TOKENS
from engine.catalog import resolve_model
from engine.knobs import DEFAULT_COORDINATOR, add_process_knobs, address
from engine.process import StartError, announce, run_program
from protos.errors import Reason, ServingError
from protos.metrics_server import serve_metrics
from protos.pd.v1 import cluster_pb2_grpc, generation_pb2_grpc
from protos.serving import GrpcServer

STOP_GRACE_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator",
        description="The front of a disagg cluster: public API, tokenizer, pairing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--listen",
        type=address,
        metavar="HOST:PORT",
        default=DEFAULT_COORDINATOR,
        help="where to serve clients and nodes; port 0 is any free port",
    )
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="whose tokenizer to use: catalogue name, folder, .gguf file or hub id",
    )
    parser.add_argument(
        "--local-prefill",
        choices=("auto", "never"),
        default="auto",
        help="whether decode nodes may prefill, within their step budget, when that is predicted "
        "to be sooner than on a busy prefill node; without prefill nodes they always do",
    )
    parser.add_argument(
        "--max-waiting", type=int, default=MAX_WAITING, metavar="N", help="requests that may wait"
    )
    parser.add_argument(
        "--max-waiting-tokens",
        type=int,
        default=MAX_WAITING_TOKENS,
        metavar="N",
        help="prompt and output tokens, at most, of requests that wait",
    )
    parser.add_argument(
        "--tenant-weight",
        type=_weight,
        action="append",
        default=[],
        metavar="TENANT=WEIGHT",
        help="a tenant's share of tokens while several wait; 1 for who is not named; repeatable",
    )
    parser.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let tenants find each other's cached prefixes: less to compute, and who measures "
        "times learns what others have sent",
    )
    add_process_knobs(parser)
    args = parser.parse_args()
    return run_program(
        "coordinator",
        lambda stop: _serve(args, stop),
        exit_with_parent=args.exit_with_parent,
        log_format=args.log_format,
    )


def _weight(text: str) -> tuple[str, float]:
    tenant, equals, weight = text.rpartition("=")
    try:
        if equals and 0 < float(weight) < float("inf"):
            return tenant, float(weight)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not TENANT=WEIGHT with a weight above 0")


async def _serve(args: argparse.Namespace, stop: asyncio.Event) -> None:
    try:
        model = resolve_model(args.model, allow_download=False)
        tokenizer = ModelTokenizer(model.folder)
    except ValueError as error:
        raise StartError(str(error)) from error
    vocab_size = json.loads((model.folder / "config.json").read_text())["vocab_size"]
    registry = Registry()
    channels = NodeChannels()
    queue = PairingQueue(
        registry,
        max_waiting=args.max_waiting,
        max_waiting_tokens=args.max_waiting_tokens,
        weights=dict(args.tenant_weight),
        may_be_local=args.local_prefill == "auto",
    )
    metrics = CollectorRegistry()

    def limits() -> ServedLimits:
        return ServedLimits(
            model=model.name, vocab_size=vocab_size, max_model_len=_max_model_len(registry)
        )

    server = GrpcServer(max_receive_bytes=MAX_REQUEST_BYTES)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        GenerationServicer(
            tokenizer=tokenizer,
            limits=limits,
            queue=queue,
            channels=channels,
            metrics=GenerationMetrics(metrics, nodes=registry, queue=queue),
            shares_cache=args.share_prefix_cache,
        ),
        server.server,
    )
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(
        ClusterServicer(registry, model=model.name), server.server
    )
    server.announce("pd.v1.GenerationService")
    server.announce("pd.v1.ClusterService")
    async with AsyncExitStack() as stack:
        try:
            metrics_address = await stack.enter_async_context(
                serve_metrics(args.metrics_listen, metrics)
            )
            bound = await server.start(args.listen)
        except OSError as error:
            raise StartError(str(error)) from error
        announce(
            role="coordinator",
            node_id="coordinator",
            address=bound,
            metrics_address=metrics_address,
        )
        await server.set_serving(True)
        await stop.wait()
        await server.set_serving(False)
        await server.stop(grace_s=STOP_GRACE_S)
        await channels.close()


def _max_model_len(registry: Registry) -> int:
    """The longest request that every serving node takes. Raises ServingError without nodes."""
    serving = [node.max_model_len for node in registry.nodes.values() if node.is_serving]
    if not serving:
        raise ServingError(Reason.NO_NODES, "no node is serving", retry_after_s=1.0)
    return min(serving)


if __name__ == "__main__":
    sys.exit(main())
