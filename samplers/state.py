"""The state of one sequence: the only thing that changes while a sampler decodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from samplers.ngram import NGram

Token = int
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is true of a model and concerns a sampler.

    Attributes:
        vocab_size: rows of the language-model head.
        mask_id: the id that stands for "undecided"; None for an autoregressive model.
        end_ids: ids that end an answer.
        shift: the prediction for slot i is read at row ``i - shift`` (0: LLaDA; 1: autoregressive models, Dream).
        attention: the model's own pattern, ``full``, ``causal``, ``blocks`` or ``canvas`` (DiffusionGemma's).
        attentions: every pattern it can serve.
        block_origin: ``prompt`` if blocks are counted from the prompt's end, ``zero`` if from position 0.
        trained_block: block size the model was trained with, if any.
        max_positions: longest row the model knows.
        draft: what is true of the drafter that the model comes with, if any.
    """

    vocab_size: int
    mask_id: int | None
    end_ids: frozenset[int]
    shift: int = 0
    attention: str = "full"
    attentions: frozenset[str] = frozenset({"full"})
    block_origin: str = "prompt"
    trained_block: int | None = None
    max_positions: int | None = None
    draft: ModelFacts | None = None


@dataclass(slots=True)
class DecodeState:
    """Tokens of one row, prompt first, and what is decided of them.

    Attributes:
        tokens: ids of the whole row; undecided slots hold the mask id, or noise where a model starts from that.
        mask: True where a slot is undecided.
        confidences: of the last commit of a slot; 0.0 before, 1.0 for the prompt.
        prompt_length: first slot of the canvas.
        asked: slots of the canvas that were asked for; whole blocks may take some more.
        model: what is true of the model.
        stream: key of this sequence's random numbers (see `uniform`).
        forwards: forwards made so far, kept by the engine.
        steps: those of them that were asked for a token, and steps that a sampler took with one forward besides; they
            number the draws, whatever a cache adds in forwards.
        committed_at: forwards made when a slot got the token it holds; -1 for the prompt and undecided slots.
        revised: committed tokens that changed later.
        changes: slots changed since the engine last asked.
        notes: what a sampler counts besides, for comparing with another project's own bookkeeping.
        ngram: counts of tokens in a row, for samplers that draft or choose drafts by them.
    """

    tokens: list[Token]
    mask: list[bool]
    confidences: list[float]
    prompt_length: int
    asked: int
    model: ModelFacts
    stream: int = 0
    forwards: int = 0
    steps: int = 0
    committed_at: list[int] = field(default_factory=list)
    revised: int = 0
    changes: list[int] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    ngram: NGram | None = None
    _held: dict[int, Token] = field(default_factory=dict)  # what a remasked slot held

    @classmethod
    def masked(
        cls, prompt: list[Token], asked: int, model: ModelFacts, stream: int = 0, length: int | None = None
    ) -> DecodeState:
        """A prompt followed by ``length`` undecided slots, by default those asked for.

        A mask id inside the prompt is text, not undecided.
        """
        length = asked if length is None else length
        undecided = model.mask_id if model.mask_id is not None else 0
        return cls(
            tokens=[*prompt, *[undecided] * length],
            mask=[False] * len(prompt) + [True] * length,
            confidences=[1.0] * len(prompt) + [0.0] * length,
            prompt_length=len(prompt),
            asked=asked,
            model=model,
            stream=stream,
            committed_at=[-1] * (len(prompt) + length),
        )

    @property
    def canvas(self) -> range:
        """The generated slots."""
        return range(self.prompt_length, len(self.tokens))

    @property
    def row(self) -> range:
        """All slots."""
        return range(len(self.tokens))

    def blocks(self, size: int) -> Iterator[range]:
        """Blocks of the canvas, left to right, as ranges of slots.

        Where the model counts blocks from position 0 the first one also holds the prompt's tail.
        """
        start = self.prompt_length
        if self.model.block_origin == "zero":
            start -= start % size
        for first in range(start, len(self.tokens), size):
            yield range(first, min(first + size, len(self.tokens)))

    def masked_in(self, slots: range) -> list[int]:
        """Undecided slots among ``slots``, ascending."""
        mask = self.mask
        return [slot for slot in slots if mask[slot]]

    def commit(self, slot: int, token: Token, confidence: float = 1.0) -> None:
        """Decide a slot, or decide it anew; a committed token that changes counts as revised.

        Raises:
            ValueError: for the mask id, or an id that the model does not have: no answer can hold them; and for a slot
                that is none of the canvas.
        """
        if token == self.model.mask_id or not 0 <= token < self.model.vocab_size:
            raise ValueError(f"the sampler committed {token} to slot {slot}: not an id that an answer can hold")
        self._refuse_outside(slot, f"committed {token} to")
        before = self._held.pop(slot, None) if self.mask[slot] else self.tokens[slot]
        if before is not None and before != token:
            self.revised += 1
        if self.mask[slot] or before != token:
            self.committed_at[slot] = self.forwards
        self.tokens[slot] = token
        self.mask[slot] = False
        self.confidences[slot] = confidence
        self.changes.append(slot)

    def remask(self, slot: int) -> None:
        """Take a decision back.

        Raises:
            ValueError: for a slot that is none of the canvas, or on a model without a mask token.
        """
        if self.model.mask_id is None:
            raise ValueError(f"the sampler remasked slot {slot} of a model that has no mask token")
        self._open(slot, self.model.mask_id)

    def renoise(self, slot: int, token: Token) -> None:
        """Show the model a token that decides nothing; a decision on the slot is taken back."""
        self._open(slot, token)

    def _open(self, slot: int, shown: Token) -> None:
        self._refuse_outside(slot, "took back")
        if not self.mask[slot]:
            self._held[slot] = self.tokens[slot]
        self.tokens[slot] = shown
        self.mask[slot] = True
        self.confidences[slot] = 0.0
        self.committed_at[slot] = -1
        self.changes.append(slot)

    def _refuse_outside(self, slot: int, done: str) -> None:
        if not self.prompt_length <= slot < len(self.tokens):
            whose = "is part of the prompt" if 0 <= slot < self.prompt_length else "does not exist"
            slots = f"{self.prompt_length} to {len(self.tokens) - 1}"
            raise ValueError(f"the sampler {done} slot {slot}, which {whose}: the canvas is slots {slots}")

    def ended(self, until: int) -> bool:
        """Whether an end token stands before slot ``until`` with every slot before it decided."""
        for slot in range(self.prompt_length, until):
            if self.mask[slot]:
                return False
            if self.tokens[slot] in self.model.end_ids:
                return True
        return False

    def uniform(self, slot: int, draw: int) -> float:
        """A number in (0, 1) that depends on nothing but this sequence's stream, the slot and the draw."""
        return uniform(self.stream, slot, draw)


def stream_key(seed: int, sample: int) -> int:
    """The 64-bit key of one sequence's random numbers."""
    return _mix(_mix(seed & _MASK64) + sample)


def uniform(stream: int, slot: int, draw: int) -> float:
    """Counter-based: the top 52 bits of a SplitMix64 hash (Steele et al. 2014) of the counters, mid-cell."""
    bits = _mix(_mix(stream + slot) + draw)
    return ((bits >> 12) + 0.5) * 2.0**-52


def _mix(x: int) -> int:
    """SplitMix64's increment and finaliser, modulo 2**64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
