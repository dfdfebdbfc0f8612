"""python -m prefill_server: one prefill node."""

import sys

from engine.knobs import parse_knobs
from engine.node_program import serve_node
from engine.process import run_program
from prefill_server.service import PrefillRole
from protos.pd.v1 import cluster_pb2


def main() -> int:
    config = parse_knobs("prefill")
    return run_program(
        config.node_id,
        lambda stop: serve_node(
            config,
            stop,
            role=cluster_pb2.NODE_ROLE_PREFILL,
            role_name="prefill",
            make_role=PrefillRole,
        ),
        exit_with_parent=config.exit_with_parent,
    )


if __name__ == "__main__":
    sys.exit(main())
