"""python -m prefill_server: one prefill node."""

import sys

from engine.node_program import main
from prefill_server.service import PrefillRole
from protos.pd.v1 import cluster_pb2

if __name__ == "__main__":
    sys.exit(main("prefill", role=cluster_pb2.NODE_ROLE_PREFILL, make_role=PrefillRole))
