"""From hidden states to tokens and statistics, on the device, for all wanted slots of a group at once.

Shapes: N wanted slots, n slots of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from adapters.drafts import Drafts
from adapters.drawing import drawn, judged, law_of, uniforms
from adapters.readouts import Memory, Place, named
from samplers import Forward, Law

__all__ = ["GREEDY_COPIES", "SAMPLED_COPIES", "Head", "OwnReadOuts", "ReadOut", "uniforms"]

Head = Callable[[torch.Tensor], torch.Tensor]
GREEDY_COPIES, SAMPLED_COPIES = 3, 10  # float32 tensors of a chunk's (n, V) alive at the peak


class OwnReadOuts:
    """The read-outs that a forward names, for the wanted slots of its group at their places."""

    def __init__(self, ask: Collection[str], memory: Memory, places: Sequence[Place]) -> None:
        self.names, self.memory, self.places = named(ask), memory, places

    def __call__(self, hidden: torch.Tensor, start: int, logits: torch.Tensor) -> list[torch.Tensor]:
        """Columns of the chunk that begins at slot ``start`` of N: (n, D) and (n, V) to k tensors (n,)."""
        places = self.places[start : start + len(hidden)]
        said = [self.memory.read(name, logits, hidden, places) for name in self.names]
        return [column for part in said for column in part.unbind(1)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is read at once."""

    hidden: torch.Tensor  # (n, D)
    rivals: torch.Tensor  # (n, k) ids
    counters: Sequence[torch.Tensor]  # of the uniform of each slot: streams, slots, draws, (n,) each
    own: Callable[[torch.Tensor], list[torch.Tensor]] | None
    drafts: Drafts | None


class ReadOut:
    """Runs the head and the law in chunks, so that logits and their temporaries stay within ``logits_mib`` MiB.

    A single slot always fits: it is the smallest chunk. Tokens are drawn in float32 or better. So is confidence
    (probability, margin, entropy) computed, or with ``confidence_dtype="model"`` in the dtype of the model's logits, in
    which LLaDA's and Dream's own code has it: in bfloat16 all above 0.998 is 1, and ties are frequent.
    """

    def __init__(
        self, mask_id: int | None, vocab_size: int, logits_mib: int, confidence_dtype: str = "float32"
    ) -> None:
        self.mask_id, self.vocab_size, self.bytes = mask_id, vocab_size, logits_mib * 2**20
        self.confidence_dtype = confidence_dtype

    def __call__(
        self,
        hidden: torch.Tensor,
        head: Head,
        forward: Forward,
        streams: torch.Tensor,
        slots: torch.Tensor,
        draws: torch.Tensor,
        rivals: torch.Tensor | None = None,
        own: OwnReadOuts | None = None,
        drafts: Drafts | None = None,
    ) -> list[list[float]]:
        """Columns over the N slots.

        Token, confidence, finite, then margin and entropy if asked, then rivals, then the likeliest ids and their
        log-probabilities, then verdicts on drafts, then own.

        Args:
            hidden: (N, D).
            forward: any of the group; its law and what it asks hold for all.
            streams, slots, draws: (N,) counters of the uniform of each slot.
            rivals: (N, k) ids whose probability is asked.
            own: read-outs of the sampler's own.
            drafts: what is to be done with the laws that tokens are drawn from.
        """
        size = self.chunk(forward, bool(own))
        rivals = draws.new_empty(len(draws), 0) if rivals is None else rivals
        chunks = zip(*(tensor.split(size) for tensor in (hidden, rivals, streams, slots, draws)), strict=True)
        parts = []
        for start, (part, ids, *counters) in zip(range(0, len(draws), size), chunks):
            run = partial(own, part, start) if own else None
            mine = drafts.part(start, len(part)) if drafts else None
            parts.append(self._statistics(head, forward, Chunk(part, ids, counters, run, mine)))
        return torch.cat(parts, dim=1).tolist()

    def chunk(self, forward: Forward, own: bool = False) -> int:
        """Slots whose logits fit the budget; read-outs of one's own count as a law to draw from."""
        law = forward.law
        plain = law.temperature == 0 and law.judged != "filtered" and not own
        plain = plain and not (forward.best or forward.carry or forward.judged_drafts)
        copies = GREEDY_COPIES if plain else SAMPLED_COPIES
        return max(1, self.bytes // (4 * self.vocab_size * copies))

    def _statistics(self, head: Head, forward: Forward, chunk: Chunk) -> torch.Tensor:
        """(columns, n) in float64, in the order of `__call__`."""
        logits, law = head(chunk.hidden), forward.law
        own = logits.dtype
        logits = logits.to(torch.promote_types(own, torch.float32))  # the narrow copy is let go
        _rule_out(logits, law.banned)
        said = chunk.own(logits) if chunk.own else []
        best = likeliest(logits, min(forward.best, self.vocab_size), self.mask_id) if forward.best else []
        token, *verdict = self._draw(logits, law, chunk)
        logits = judged(logits, law)
        _rule_out(logits, law.unsure)
        if self.confidence_dtype == "model":
            logits = logits.to(own)  # exact: they were of it
        likely = _probabilities(logits, chunk.rivals)
        statistics = _in_dtype_of_model if self.confidence_dtype == "model" else _in_full
        columns = [token, *statistics(logits, token, forward.ask), *likely, *best, *verdict, *said]
        return torch.stack([column.double() for column in columns])

    def _draw(self, logits: torch.Tensor, law: Law, chunk: Chunk) -> list[torch.Tensor]:
        """A token a slot, (n,), and verdicts, if drafts are judged.

        The mask id is out of the race here and back in the logits afterwards.
        """
        held = None
        if self.mask_id is not None:
            held = logits[:, self.mask_id].clone()
            logits[:, self.mask_id] = -torch.inf
        if chunk.drafts:
            said = chunk.drafts.draw(law_of(logits, law), chunk.counters)
        else:
            greedy = law.temperature == 0
            said = [logits.argmax(-1) if greedy else drawn(law_of(logits, law), uniforms(*chunk.counters))]
        if held is not None:
            logits[:, self.mask_id] = held
        return said


def likeliest(logits: torch.Tensor, count: int, mask_id: int | None) -> list[torch.Tensor]:
    """The likeliest ids of (n, V), then their log-probabilities: twice ``count`` columns of n; of equals the lowest id.

    The mask id is none of them, though its probability counts. `torch.topk` promises no order among equals, so ids are
    chosen by comparing values.
    """
    total = logits.logsumexp(-1, keepdim=True)
    raw = logits if mask_id is None else logits.clone()
    if mask_id is not None:
        raw[:, mask_id] = -torch.inf
    least = raw.topk(count, dim=-1).values[:, -1:]
    above, level = raw > least, raw == least
    fits = level.cumsum(-1, dtype=torch.int32) <= count - above.sum(-1, keepdim=True)
    backwards = torch.arange(logits.shape[1], 0, -1, dtype=torch.int32, device=logits.device)
    chosen = backwards.where(above | (level & fits), 0).topk(count, dim=-1).values  # all unlike: from the lowest id up
    ids = (logits.shape[1] - chosen.long()).clamp_(max=logits.shape[1] - 1)  # of no numbers none is chosen
    values, order = (raw.gather(1, ids) - total).sort(dim=-1, descending=True, stable=True)
    return [*ids.gather(1, order).unbind(1), *values.unbind(1)]


def _probabilities(logits: torch.Tensor, ids: torch.Tensor) -> Sequence[torch.Tensor]:
    """Of the ids (n, k) under the softmax of (n, V): k columns of n."""
    if not ids.shape[1]:
        return ()
    return (logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)).exp().unbind(1)


def _in_full(logits: torch.Tensor, token: torch.Tensor, ask: Collection[str]) -> list[torch.Tensor]:
    """Confidence, finite, then margin and entropy if asked; ``logits`` (n, V) is overwritten."""
    total = logits.logsumexp(-1)
    columns = [(logits.gather(1, token[:, None])[:, 0] - total).exp(), total.isfinite()]
    if "margin" in ask:
        best = (logits.topk(2, dim=-1).values - total[:, None]).exp()
        columns.append(best[:, 0] - best[:, 1])
    if "entropy" in ask:
        columns.append(torch.special.entr((logits - total[:, None]).exp_()).sum(-1))
    return columns


def _in_dtype_of_model(logits: torch.Tensor, token: torch.Tensor, ask: Collection[str]) -> list[torch.Tensor]:
    """As `_in_full`, every step rounded to the dtype of ``logits``, as Dream's `sample_tokens` does."""
    law = logits.softmax(-1)
    columns = [law.gather(1, token[:, None])[:, 0], logits.amax(-1).isfinite()]
    if "margin" in ask:
        best = law.topk(2, dim=-1).values
        columns.append(best[:, 0] - best[:, 1])
    if "entropy" in ask:
        surprise = law.log().clamp_(min=torch.finfo(law.dtype).min)  # a probability of 0 adds 0
        columns.append(-surprise.mul_(law).sum(-1))
    return columns


def _rule_out(logits: torch.Tensor, ids: tuple[int, ...]) -> None:
    for id_ in ids:  # a few fills on the device cost less than sending the ids up
        logits[:, id_] = -torch.inf
