"""python -m decode_server: one decode node. Without prefill nodes it is colocated serving."""

import sys

from decode_server.service import DecodeRole
from engine.node_program import main
from protos.pd.v1 import cluster_pb2

if __name__ == "__main__":
    sys.exit(main("decode", role=cluster_pb2.NODE_ROLE_DECODE, make_role=DecodeRole))
