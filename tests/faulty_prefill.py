"""python -m tests.faulty_prefill: a prefill node whose first lane has a fault.

DISAGG_TEST_FAULT is FAULT:CHUNK, as in tests/faulty_plane.py.
"""

import os
import sys

from engine.node_program import main
from kvtransfer import outgoing_lane
from prefill_server.service import PrefillRole
from protos.pd.v1 import cluster_pb2
from tests.faulty_plane import faulty

if __name__ == "__main__":
    fault, _, chunk = os.environ["DISAGG_TEST_FAULT"].partition(":")
    outgoing_lane.sending_plane = faulty(outgoing_lane.sending_plane, fault, at=int(chunk))
    sys.exit(main("prefill", role=cluster_pb2.NODE_ROLE_PREFILL, make_role=PrefillRole))
