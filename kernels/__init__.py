"""Ops that run on the device: one op, one file.

transformers looks for a PyPI package of this name; this file must import nothing, and its version
must stay below what transformers accepts, so that it is reported as unavailable.
"""

__version__ = "0.0.0"
