"""Memory for blocks that have never been used, made before somebody has to wait for it.

    pool reaches new blocks --reached(num_blocks)--> thread --> pages of the next AHEAD_BYTES

The kernel finds and clears a page when it is first written, in the middle of a step: 1 ms for the
KV of a 256-token prompt, and 17 ms were seen in a virtual machine whose host did not have the
memory at hand. With prefix caching every block of the pool is new once. So a thread of the lowest
priority touches pages a little ahead; what is never reached is never taken.
"""

import ctypes
import logging
import os
import threading

from kvtransfer.memory import HostMemory

log = logging.getLogger(__name__)

AHEAD_BYTES = 512 * 1024 * 1024
_PIECE_BYTES = 4 * 1024 * 1024
# Not in Python's mmap; Linux 5.14 and newer have it.
_MADV_POPULATE_WRITE = 23
_LOWEST_PRIORITY = 19


class HostPages:
    """Owner of the thread, which ends with the process. Blocks are used in order of their ids."""

    def __init__(self, memory: HostMemory) -> None:
        self._size = memory.num_blocks * memory.layout.block_bytes
        self._block_bytes = memory.layout.block_bytes
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
        # From the C library, because Python's own madvise keeps the GIL while pages are cleared.
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._changed = threading.Condition()
        self._wanted = min(self._size, AHEAD_BYTES)
        self._thread = threading.Thread(target=self._main, name="pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def reached(self, num_blocks: int) -> None:
        """So many blocks have been in use. Any thread."""
        wanted = min(self._size, num_blocks * self._block_bytes + AHEAD_BYTES)
        if wanted - self._wanted >= _PIECE_BYTES or wanted == self._size != self._wanted:
            with self._changed:
                self._wanted = max(self._wanted, wanted)
                self._changed.notify()

    def _main(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        done = 0
        while done < self._size:
            with self._changed:
                while done >= self._wanted:
                    self._changed.wait()
            size = min(_PIECE_BYTES, self._size - done)
            failed = self._madvise(
                ctypes.c_void_p(self._start + done),
                ctypes.c_size_t(size),
                ctypes.c_int(_MADV_POPULATE_WRITE),
            )
            if failed:
                # An older kernel, or no memory: pages come when they are written, as ever.
                log.info("pages are not made ahead: %s", os.strerror(ctypes.get_errno()))
                return
            done += size
