"""What a sampler may ask of a model: slots that are there, a content that is told, attention that is served."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.readouts import named, refuse_unknown
from samplers import Attend, DecodeState, Forward, Kind, ModelFacts, Role


def unprompted(forward: Forward, state: DecodeState, model: ModelFacts) -> str | None:
    """Why there is nothing to predict the first token from."""
    if state.prompt_length or not model.shift or (forward.window and min(forward.want, default=1) >= model.shift):
        return None
    return "an empty prompt: this model needs at least one token to predict the next"


def unplaced(forward: Forward, slots: int) -> str | None:
    """Why a forward does not fit a row of so many slots, spare ones included."""
    window, store = forward.window, forward.store
    for part in (window, forward.context):
        if part.step != 1 or part.start < 0 or part.stop > slots:
            return f"the sampler asked for {part} in a row of {slots} slots"
    if not window:
        return "the sampler asked for an empty window"
    if store and (store.step != 1 or store.start < window.start or store.stop > window.stop):
        return f"the sampler wants to store {store}, which lies outside {window}"
    if keep := forward.keep:
        first = window.start - len(keep)
        if len(set(keep)) < len(keep) or not 0 <= first <= min(keep) <= max(keep) < slots:
            return f"the sampler wants to keep slots {list(keep)}, which do not close up before {window}"
    return None


def unwanted(forward: Forward, state: DecodeState, model: ModelFacts) -> str | None:
    """Why a forward's content cannot be shown, or what it wants cannot be read."""
    window, want, shift = forward.window, forward.want, model.shift
    low, high = (min(want) - shift, max(want) - shift) if want else (window.start, window.start)
    if forward.guidance and (forward.context or forward.store or model.mask_id is None):
        return "guidance needs a model with a mask token, and a window that reads and stores no keys"
    if any(slot not in window for slot in forward.inputs):
        return f"the sampler mixed the inputs of slots {sorted(forward.inputs)}, some of which lie outside {window}"
    try:
        refuse_unknown(forward.ask)
    except ValueError as error:
        return str(error)
    if not window.start <= low <= high < window.stop:
        return f"the sampler wants slots {min(want)}..{max(want)}, whose rows lie outside {window}"
    return _unshown(forward, state, model) or _unproposed(forward)


def _unshown(forward: Forward, state: DecodeState, model: ModelFacts) -> str | None:
    """Why its variants or positions are none; spare slots hold nothing of their own."""
    window, variants, positions = forward.window, forward.variants, forward.positions
    spare = range(max(window.start, len(state.tokens)), window.stop)
    for content in variants or ({},):
        if outside := [slot for slot in content if slot not in window]:
            return f"the sampler shows other tokens at slots {sorted(outside)}, which lie outside {window}"
        if unknown := [token for token in content.values() if not 0 <= token < model.vocab_size]:
            return f"the sampler shows the token {unknown[0]}, which is no id of the model"
        if bare := [slot for slot in spare if slot not in content]:
            return f"the sampler shows nothing at slots {bare} behind the row"
    if len(variants) > 1 and (forward.store or forward.guidance or forward.inputs):
        return "several variants of a window can't be stored, guided or mixed"
    if len(variants) > 1 and (forward.carry or forward.judged_drafts or named(forward.ask)):
        return "several variants of a window can't carry or judge laws, nor have read-outs of a sampler's own"
    if positions is not None and len(positions) != len(window):
        return f"the sampler gave {len(positions)} positions for {window}"
    if positions and min(positions) < 0:
        return f"the sampler gave the position {min(positions)}: they begin at 0"
    if forward.attend and forward.attend.pattern == "tree":
        return _ungrown(forward.attend.parents, window)
    return None


def _ungrown(parents: Sequence[int], window: range) -> str | None:
    """Why this is no tree over a window."""
    first = len(parents) == len(window) and parents[0] == 0
    if first and all(0 <= parent < place for place, parent in enumerate(parents) if place):
        return None
    return f"the sampler gave {list(parents)} as a tree over {window}: one parent a slot, and each before its children"


def _unproposed(forward: Forward) -> str | None:
    """Why its drafts could not be counted: the engine looks for those shown in what is then decided."""
    proposed, shown = forward.proposed, forward.variants[-1] if forward.variants else {}
    if forward.kind is Kind.DRAFT and forward.role is not Role.DRAFT:
        return "a forward of kind draft is of the drafter: use denoise for one of the model itself"
    if proposed and forward.kind is not Kind.VERIFY:
        return f"the sampler proposes drafts in a forward of kind {forward.kind}: use verify"
    if hidden := [slot for slot in proposed if slot not in shown]:
        return f"the sampler proposes drafts at slots {hidden}, but shows none there (see Forward.variants)"
    if len(set(proposed)) < len(proposed):
        return f"the sampler proposes drafts at slots {list(proposed)}, some of them twice"
    return None


def unserved(attend: Attend | None, model: ModelFacts) -> str | None:
    """Why a model does not attend so."""
    if attend is None:
        told = model.attention != "blocks"
        return None if told else "the sampler did not say where the blocks of this block-causal model lie"
    pattern = "causal" if attend.pattern == "tree" else attend.pattern  # of which a tree is a form
    if pattern not in model.attentions:
        served = ", ".join(sorted(model.attentions))
        return f"the sampler asked for {attend.pattern} attention of a model that serves {served}"
    if attend.pattern == "blocks" and attend.size < 1:
        return f"the sampler asked for blocks of {attend.size} slots"
    return None
