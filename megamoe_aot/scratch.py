"""Scratch memory of the list structure: who owns it, and when it may be allocated.

The CTAs of a list launch talk through a block of global memory (an epoch, a ticket and packets, see work_list.py). One launch uses
a block at a time, and the launches of one stream follow one another, so a block belongs to one kernel of one bound layer and one
stream: two streams never share one. It is zeroed before its first launch and never again. Each launch counts the epoch up on the
device, so a replayed graph, which passes the same arguments each time, has a new epoch at each replay.

**Graphs.** A captured launch keeps the block of the stream that it was captured on, on whatever stream the graph is replayed. So
launches of one layer that were captured on one stream must not run at the same time as each other or as eager launches on that
stream: capture on a stream of its own what is to run beside something else, and keep that stream as long as the graph. Replays of
one graph do not overlap: CUDA orders them. A graph needs its layer alive, as it needs the weights.

**Failed launches.** The last CTA that takes a ticket resets the ticket and publishes the epoch. A launch that the driver refuses
never ran and changes neither. One that dies on the way leaves the block half-way, but also its context unusable (every later
CUDA call fails with the same error) and with it the block: there is nothing to repair.

**Handles.** The key of a block is the stream's handle. The default streams 0 and CU_STREAM_PER_THREAD (2) can mean another stream
in every thread, so there each thread has a block; it stays until the layer goes, also if its thread ends first. A destroyed stream is
released once its work is done (so the documentation of cuStreamDestroy); a new stream that gets its handle finds its block, idle.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from . import driver
from .errors import CaptureError, MegaMoeError

PER_THREAD = (0, 2)
"""Handles that can be another stream in each thread: the default stream (if the process chose per-thread default streams), and
CU_STREAM_PER_THREAD."""


class Scratch:
    """The blocks of one list kernel of one bound layer. Safe to use from several threads; ``context`` must be current in each call."""

    def __init__(self, context: int, size: int) -> None:
        """``size``: bytes of a block. Nothing is allocated yet."""
        self.size = size
        self._streams: dict[int, int] = {}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._owned: list[int] = []
        # Not at exit: the driver takes the memory back, and may be gone before us.
        weakref.finalize(self, _free, context, self._owned).atexit = False

    def address(self, stream: int) -> int:
        """Device address of the stream's block, allocated and zeroed at the stream's first call.

        Raises:
            CaptureError: there is none yet and the stream is capturing.
            DriverCallError: out of memory, for example.
        """
        # A read without the lock: entries are only ever added, whole.
        found = self._blocks(stream).get(stream)
        return self._add(stream) if found is None else found

    def _blocks(self, stream: int) -> dict[int, int]:
        if stream not in PER_THREAD:
            return self._streams
        try:
            mine: dict[int, int] = self._local.blocks
        except AttributeError:
            mine = self._local.blocks = {}
        return mine

    def _add(self, stream: int) -> int:
        with self._lock:
            blocks = self._blocks(stream)
            if stream not in blocks:
                if _capturing(stream):
                    raise CaptureError(
                        f"stream {stream:#x} is capturing a CUDA graph and this layer has no scratch memory for it yet, which cannot be "
                        "allocated inside a capture: call layer.prepare(stream) before the capture, with the stream to be captured"
                    )
                blocks[stream] = self._allocate(stream)
            return blocks[stream]

    def _allocate(self, stream: int) -> int:
        """A zeroed block; the zeros are ordered before what follows on ``stream``."""
        with _beside_captures():
            block = int(driver.call("cuMemAlloc", self.size))
            try:
                driver.call("cuMemsetD8Async", block, 0, self.size, stream)
            except MegaMoeError:
                driver.call("cuMemFree", block)
                raise
        self._owned.append(block)
        return block


def _capturing(stream: int) -> bool:
    return int(driver.call("cuStreamIsCapturing", stream)) != 0


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Let this thread allocate while another one captures a graph, which would otherwise invalidate that capture."""
    relaxed = driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = driver.call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", before)


def _free(context: int, blocks: list[int]) -> None:
    """Give the blocks back; cuMemFree waits for launches that still use them. Runs in a finalizer: it must not raise."""
    if not blocks:
        return
    with contextlib.suppress(MegaMoeError), driver.active(context), _beside_captures():
        for block in blocks:
            driver.call("cuMemFree", block)
