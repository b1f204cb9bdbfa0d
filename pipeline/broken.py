"""What a sampler did that none may do, in one sentence with the line of the file that is to be mended."""

from __future__ import annotations

import traceback
from pathlib import Path

import samplers
from pipeline.errors import one_line
from samplers import Forward, Sampler

SHIPPED = Path(samplers.__file__).parent


def told(error: Exception, sampler: Sampler) -> str:
    """What a sampler's generator raised, and where: the last line outside the samplers that ship, if there is one.

    A user's own sampler calls those, and what they refuse is its doing.
    """
    name = type(sampler).__name__
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the engine's
    if not frames:
        return f"{name}.decode gave no generator: it must yield its forwards"
    own = [frame for frame in frames if not _ships(frame)]
    refused = isinstance(error, ValueError) and _ships(frames[-1])  # in words of ours, about the sampler
    said = str(error) if refused else f"{name} raised {one_line(error)}"
    return f"{said} ({_place((own or frames)[-1])})" if own or not refused else said


def not_a_forward(forward: object) -> str | None:
    """Why what a sampler yielded is nothing that a model could run."""
    if not isinstance(forward, Forward):
        return f"the sampler yielded {forward!r}, which is no samplers.Forward"
    for name, slots in (("window", forward.window), ("context", forward.context), ("store", forward.store)):
        if not isinstance(slots, range):
            return f"the sampler yielded a Forward whose {name} is {slots!r}: it must be a range of slots"
    return None


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name} line {frame.lineno}, in {frame.name}"


def _ships(frame: traceback.FrameSummary) -> bool:
    return SHIPPED in Path(frame.filename).parents
