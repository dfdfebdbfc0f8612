"""python -m coordinator: the front of a cluster."""

import argparse
import asyncio
import json
import sys

from coordinator.checked_request import ServedLimits
from coordinator.cluster_service import ClusterServicer
from coordinator.generation_service import GenerationServicer
from coordinator.node_channels import NodeChannels
from coordinator.queue import PairingQueue
from coordinator.registry import Registry
from coordinator.tokenizer import ModelTokenizer
from engine.catalog import resolve_model
from engine.knobs import DEFAULT_COORDINATOR, address
from engine.process import StartError, announce, run_program
from protos.errors import Reason, ServingError
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
        "--exit-with-parent",
        action="store_true",
        help="stop when stdin ends, as it does when the process that started this one is gone",
    )
    args = parser.parse_args()
    return run_program(
        "coordinator",
        lambda stop: _serve(args.listen, args.model, stop),
        exit_with_parent=args.exit_with_parent,
    )


async def _serve(listen: str, model_name: str, stop: asyncio.Event) -> None:
    try:
        model = resolve_model(model_name, allow_download=False)
        tokenizer = ModelTokenizer(model.folder)
    except ValueError as error:
        raise StartError(str(error)) from error
    vocab_size = json.loads((model.folder / "config.json").read_text())["vocab_size"]
    registry = Registry()
    channels = NodeChannels()

    def limits() -> ServedLimits:
        return ServedLimits(
            model=model.name, vocab_size=vocab_size, max_model_len=_max_model_len(registry)
        )

    server = GrpcServer()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        GenerationServicer(
            tokenizer=tokenizer, limits=limits, queue=PairingQueue(registry), channels=channels
        ),
        server.server,
    )
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(
        ClusterServicer(registry, model=model.name), server.server
    )
    server.announce("pd.v1.GenerationService")
    server.announce("pd.v1.ClusterService")
    try:
        bound = await server.start(listen)
    except OSError as error:
        raise StartError(str(error)) from error
    announce(role="coordinator", node_id="coordinator", address=bound)
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
