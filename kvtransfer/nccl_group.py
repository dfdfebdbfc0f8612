"""NCCL through torch: the environment it needs, opening a pair, and ending one for sure.

    open_nccl(store, rank, device=...) -> Communicator: send, recv, abort

Nothing here has run on a GPU yet. What it relies on was read in the source of torch's
ProcessGroupNCCL and checked against the headers of 2.13:

* Non-blocking is config.blocking = 0, and TORCH_NCCL_USE_COMM_NONBLOCKING for the older of torch's
  point-to-point calls. Waits inside are then bounded by TORCH_NCCL_NONBLOCKING_TIMEOUT, whose
  default is 30 minutes.
* torch's watchdog thread, on an error, sleeps a minute with the lock that a send takes, writes to
  the store and may end the process; its monitor ends it when the watchdog is late. With
  TORCH_NCCL_BLOCKING_WAIT there is neither: errors show in Work.is_completed() and wait().
* Its flight recorder keeps pointers to events that are only retired by the watchdog.
* abort() waits for its own helper thread without a limit, so the limit is set around it.
"""

import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

# KV traffic must not take the SMs from compute: at most so many blocks of threads per operation.
MAX_CTAS = 2
# NCCL 2.26 hangs at times in non-blocking mode (pytorch issue 153960).
OLDEST_NCCL = (2, 27)
NONBLOCKING_TIMEOUT_S = 5
# Above NONBLOCKING_TIMEOUT_S: the thread that aborts may be in such a call.
ABORT_BUDGET_S = 10.0
# Of a process whose communicator cannot be aborted: its GPU work and its lanes hang for ever.
WEDGED_EXIT_STATUS = 70

ENVIRONMENT = {
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(NONBLOCKING_TIMEOUT_S),
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # Without effect while there is no watchdog; here for a torch that starts one all the same.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    # One lane sends one way, in order: that its operations are serialised is meant.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


class Communicator(Protocol):
    """Two ranks. Works complete in the order in which they were begun."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any: ...

    def abort(self) -> None: ...


def prepare_environment() -> None:
    """Must come before the first group: torch reads these once. What is set already stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def nccl_version() -> Sequence[int] | None:
    """Of the library that torch has loaded; None for a torch without NCCL."""
    if not dist.is_nccl_available():
        return None
    version: Sequence[int] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return tuple(version)


def has_nccl() -> bool:
    """Whether torch brings an NCCL that lanes can use."""
    version = nccl_version()
    return version is not None and tuple(version[:2]) >= OLDEST_NCCL


def open_nccl(store: Any, rank: int, *, device: torch.device) -> Communicator:
    """A connected pair on device. Waits for rank 0's key in store and, bounded, for its peer."""
    prepare_environment()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
    options.config.blocking = 0
    options.config.min_ctas = 1
    options.config.max_ctas = MAX_CTAS
    options._timeout = timedelta(seconds=ABORT_BUDGET_S)
    group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
    # Now, so that no request pays for it, and one communicator for both kinds of operation.
    group.eager_connect_single_device(device)
    return cast(Communicator, group)


def end_process_in(budget_s: float, what: str) -> threading.Timer:
    """Better than a wedged node. Runs already; to be cancelled by whoever is in time."""
    timer = threading.Timer(budget_s, _end_process, args=(budget_s, what))
    timer.daemon = True
    timer.start()
    return timer


def _end_process(budget_s: float, what: str) -> None:
    log.critical("%s took more than %g s: the process ends", what, budget_s)
    logging.shutdown()
    os._exit(WEDGED_EXIT_STATUS)
