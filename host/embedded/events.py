"""Progress and events: what a run tells whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_listeners: list[Callable[[str, dict[str, Any]], None]] = []
_progress: list[Callable[[int, int], None]] = []


def emit(event: str, data: dict[str, Any]) -> None:
    for listener in list(_listeners):
        listener(event, data)


def listen(callback: Callable[[str, dict[str, Any]], None]) -> Callable[[], None]:
    """Call `callback(event, data)` for every event from now on; the returned function stops it."""
    _listeners.append(callback)
    return lambda: _listeners.remove(callback)


def on_progress(callback: Callable[[int, int], None]) -> Callable[[], None]:
    """Call `callback(done, total)` whenever a progress bar moves; the returned function stops it."""
    _progress.append(callback)
    return lambda: _progress.remove(callback)


class ProgressBar:
    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def update(self, n: int = 1) -> None:
        self.done += n
        for callback in list(_progress):
            callback(self.done, self.total)
