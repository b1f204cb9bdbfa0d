"""What a sampler asks of the model (`Forward`) and what it hears back (`Prediction`). Plain Python, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What a forward is for; the engine counts by it. `PREFILL` is set by the engine, never by a sampler."""

    PREFILL = "prefill"
    DENOISE = "denoise"
    REFRESH = "refresh"
    COMMIT = "commit"
    VERIFY = "verify"
    DRAFT = "draft"


class Role(StrEnum):
    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Attend:
    """Which slots of the window a slot of the window may see; the context is always visible.

    `pattern` is ``full``, ``causal``, ``blocks`` or ``tree``. For ``blocks`` a slot sees its own block and those before
    it: block edges lie at ``first``, ``first + size``, …, and whatever precedes ``first`` is one block. For ``tree`` a
    slot sees itself and its ancestors: `parents` names, for each place in the window, the place its parent has there
    (parents come first, the first place is the root and its own parent). A causal model serves it.
    """

    pattern: str
    first: int = 0
    size: int = 0
    parents: tuple[int, ...] = ()


FULL, CAUSAL = Attend("full"), Attend("causal")


@dataclass(frozen=True, slots=True)
class Law:
    """How a token is drawn from the logits of a slot.

    The order is fixed: banned ids are removed, then `temperature`, `top_k` (ids as likely as the last one stay too),
    `top_p` (smallest set whose mass reaches it, equal ones by id), then an inverse-CDF draw with one uniform per (seed,
    sample, slot, draw). Temperature 0 takes the argmax, the lowest id among equals.
    The *confidence* is the probability of the token under the raw softmax, untempered and unfiltered as in LLaDA
    (arXiv 2502.09992, reference code). `banned` ids are also out of that softmax, ids in `unsure` are out of
    it only: they may be drawn, with confidence 0. The mask id is never drawn, whatever the law.

    Attributes:
        judged: law that confidence, margin and entropy are of: ``raw``, ``tempered``, or ``filtered``: tempered
            and cut by `top_k` and `top_p` (Dream's code), also where the temperature is 0 and nothing is drawn.
        nucleus_first: `top_p` before `top_k`, as in Dream's code.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    banned: tuple[int, ...] = ()
    unsure: tuple[int, ...] = ()
    judged: str = "raw"
    nucleus_first: bool = False


GREEDY = Law()


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance: logits = u + (scale + 1) (c - u), with u of a copy of the window that lacks `hidden`.

    Attributes:
        scale: 0 is none.
        hidden: slots that the copy shows as masks.
    """

    scale: float
    hidden: range


@dataclass(frozen=True, slots=True)
class Soft:
    """A mixture of embeddings in place of a slot's own: sum of weight times embedding, what lacks to 1 is the mask's.

    The mixture is then scaled to the weighted mean of its parts' lengths (DMax, arXiv 2604.08302).
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """One run of the model on a window of slots; slots are absolute positions, the prompt included.

    Attributes:
        window: slots run, without a gap; their ids come from the state.
        want: slots whose token is asked; the row of logits read is ``slot - shift`` and must lie in the window.
        context: cached slots visible besides the window. Where the two overlap the window's new keys are seen.
        store: slots of the window whose keys and values enter the cache, at their slots; none = read only.
        keep: before running, of this role's stored slots keep these, in this order, moved to end where the window
            begins; whatever else was stored from the first of their new slots on is dropped. An accepted path of a
            tree; with slots in place already, or none, a crop. Keys keep the rotary position they were computed at.
            None changes nothing.
        inputs: slots of the window that are shown as mixtures instead of the ids they hold.
        variants: contents of the window: each a copy of it in which these slots hold these ids instead of the state's.
            Copies never see one another. Several are read only (`store` is empty) and each gets a prediction of its
            own, see `Prediction.copies`; copy k draws with ``draw + k``. Empty is the state's own content.
        positions: rotary positions of the window's slots, where these are not the slots themselves (a tree's nodes, the
            slots of which may lie behind the row, as far as `Sampler.spare_slots` says).
        attend: visibility inside the window; None is the model's own pattern, if that is full or causal.
        guidance: runs a second copy of the window along, which is never stored; needs a window without context.
        law: how tokens are drawn; `draw` numbers the draws of this sequence.
        ask: further statistics of the wanted slots: ``margin``, ``entropy``, and read-outs of the sampler's own by
            name, ``module.function`` (see "Read-outs" in docs/extending.md).
        rivals: ids of wanted slots whose probability is asked besides that of the token.
        best: how many of the likeliest ids of each wanted slot are told, with their log-probability under the raw
            softmax; equal ones by id.
        carry: what the law came to at the wanted slots stays on the device, with the row. Of drafts it is what
            `judged_drafts` holds them against; DiffusionGemma's next pass over the same window is conditioned on it
            (self-conditioning, as its native code has it), until a forward stores, or carries anew.
        proposed: slots of the window that hold drafts to be verified; the engine counts which of them survive.
        judged_drafts: the laws that the row's last forward with `carry` drew its drafts from are held against this
            one's: speculative sampling (Leviathan et al. 2023), see `Prediction.accepted`.
        kind, role: see "Counting" in docs/metrics.md.
    """

    window: range
    want: Sequence[int] = ()
    context: range = range(0)
    store: range = range(0)
    keep: Sequence[int] | None = None
    inputs: Mapping[int, Soft] = field(default_factory=dict)
    variants: Sequence[Mapping[int, int]] = ()
    positions: Sequence[int] | None = None
    attend: Attend | None = None
    guidance: Guidance | None = None
    law: Law = GREEDY
    draw: int = 0
    ask: frozenset[str] = frozenset()
    rivals: Mapping[int, Sequence[int]] = field(default_factory=dict)
    best: int = 0
    carry: bool = False
    proposed: Sequence[int] = ()
    judged_drafts: bool = False
    kind: Kind = Kind.DENOISE
    role: Role = Role.TARGET

    @property
    def copies(self) -> int:
        """Of the window that run along in this one forward."""
        return 2 if self.guidance else max(1, len(self.variants))


@dataclass(slots=True)
class Prediction:
    """What the model said of the wanted slots, keyed by slot.

    Attributes:
        positions: the wanted slots, in the order asked.
        token: drawn id.
        confidence: probability of that id, 0..1 (see `Law`), computed in float32 or better.
        margin: probability of the best minus that of the second best, if asked.
        entropy: of the raw softmax, in nats, if asked.
        rivals: probability of the ids asked for besides, by slot and id; under the same law as the confidence.
        best: by wanted slot, (id, log-probability) of its likeliest ids, likeliest first, if asked.
        accepted: by wanted slot that holds a draft, whether speculative sampling accepts it, if asked; `token` of that
            slot is then what is drawn if it does not.
        copies: where several variants ran, what the model said of each, this one (the first's) included.
        read: numbers of the read-outs asked for, one after the other in the order of their names.
        finite: False if a logit read was not a number or plus infinity, or all were minus infinity; the engine then
            fails the sample.
    """

    positions: Sequence[int]
    token: dict[int, int]
    confidence: dict[int, float]
    margin: dict[int, float] | None = None
    entropy: dict[int, float] | None = None
    rivals: dict[int, dict[int, float]] = field(default_factory=dict)
    best: dict[int, Sequence[tuple[int, float]]] = field(default_factory=dict)
    accepted: dict[int, bool] = field(default_factory=dict)
    copies: Sequence[Prediction] = ()
    read: dict[int, tuple[float, ...]] = field(default_factory=dict)
    finite: bool = True
