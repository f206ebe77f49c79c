"""The process-wide lock of captures: one runs at a time, whatever the runtime. It refuses instead of waiting."""

from __future__ import annotations

import threading

from graphsafe._location import Location
from graphsafe.errors import error

__all__ = ["one_capture"]


class OneCapture:
    """The process-wide lock of captures. It refuses instead of waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._where: Location | None = None
        self._thread: int | None = None

    def acquire(self, where: Location | None) -> None:
        if not self._lock.acquire(blocking=False):
            raise error("concurrent-capture", f"a capture is running already, begun at {self._where}")
        self._where, self._thread = where, threading.get_ident()

    def release(self) -> None:
        self._where = self._thread = None
        self._lock.release()

    @property
    def running(self) -> bool:
        return self._lock.locked()

    @property
    def running_here(self) -> bool:
        """Whether this thread is the one that captures."""
        return self._thread == threading.get_ident()


one_capture = OneCapture()
