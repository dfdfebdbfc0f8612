"""The wire contract, its errors, and how a server is served."""

import os

# Before grpc is imported, which happens below this package only: its C core tells of every peer
# that goes away.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
