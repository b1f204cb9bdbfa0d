"""Signals that ask a command to end: Ctrl-C, SIGTERM (a scheduler's), SIGUSR1 (its warning beforehand)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ended = False  # a signal came: the process is on its way out


class Stopped(BaseException):
    """A signal asked the run to end: `state` is what its status becomes, `code` the exit code."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.state = "interrupted" if signum == signal.SIGINT else "preempted"
        self.code = 128 + signum


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Turn the first signal into `Stopped`; further ones are ignored, so that what is closing can close.

    A terminal and a launcher often send the same signal twice.
    """

    def stop(signum: int, frame: Any) -> None:
        global _ended
        if _ended:
            return
        _ended = True
        raise Stopped(signum)

    before = [signal.signal(number, stop) for number in SIGNALS]
    try:
        yield
    finally:
        # once ended, ignore them for good: libraries put handlers back, and Python's last act would make them deadly
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, signal.SIG_IGN if _ended else handler)
