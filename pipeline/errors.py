"""The one kind of error that is the user's to mend, and errors in one line."""

from __future__ import annotations

import traceback


class UserError(ValueError):
    """Bad input, told in one sentence: the key, its value and what would be right. Shown without a traceback."""


def one_line(error: BaseException) -> str:
    """Type and message in one line; of our own errors the message only, of one that a process passed on its last line.

    Notes (`BaseException.add_note`) are left out.
    """
    if isinstance(error, UserError):
        return str(error)
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    lines = [line for line in lines if line not in getattr(error, "__notes__", ())]
    return lines[-1] if type(error).__name__ == "ProcessRaisedException" else lines[0]
