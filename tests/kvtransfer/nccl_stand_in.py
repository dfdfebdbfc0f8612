"""A communicator for the nccl plane where there is no GPU: gloo, with works that can be polled.

    link -> NcclPlaneSender(link, open_group=open_gloo)

NCCL's works tell by an event; gloo's only by wait(), so each is waited for on a thread of its own.
"""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvtransfer.lane_store import LaneStore

TIMEOUT = timedelta(seconds=4)


class Work:
    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: RuntimeError | None = None
        self._done = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        assert self._done.is_set(), "the plane must not wait for a peer"
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        try:
            self._work.wait(TIMEOUT)
        except RuntimeError as error:
            self._error = error
        self._done.set()


class GlooPair:
    """Notes the threads that touch it: there must be one."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.threads = {threading.current_thread().name}
        self.num_aborts = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.threads.add(threading.current_thread().name)
        return Work(self._group.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.threads.add(threading.current_thread().name)
        return Work(self._group.recv(tensors, peer, tag))

    def abort(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.num_aborts += 1
        self._group = None


def open_gloo(store: LaneStore, rank: int) -> GlooPair:
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return GlooPair(gloo(store, rank, 2, options))
