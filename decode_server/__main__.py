"""python -m decode_server: one decode node. Without prefill nodes it is colocated serving."""

import sys

from decode_server.service import DecodeRole
from engine.knobs import parse_knobs
from engine.node_program import serve_node
from engine.process import run_program
from protos.pd.v1 import cluster_pb2


def main() -> int:
    config = parse_knobs("decode")
    return run_program(
        config.node_id,
        lambda stop: serve_node(
            config,
            stop,
            role=cluster_pb2.NODE_ROLE_DECODE,
            role_name="decode",
            make_role=DecodeRole,
        ),
        exit_with_parent=config.exit_with_parent,
    )


if __name__ == "__main__":
    sys.exit(main())
