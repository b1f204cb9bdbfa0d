"""From hidden states to tokens and statistics, on the device, for all wanted slots of a group at once.

Shapes: N wanted slots, n slots of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from adapters.readouts import Memory, Place, named
from samplers import Forward, Law

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
    ) -> list[list[float]]:
        """Columns over the N slots: token, confidence, finite, then margin and entropy if asked, then rivals, then own.

        Args:
            hidden: (N, D).
            forward: any of the group; its law and what it asks hold for all.
            streams, slots, draws: (N,) counters of the uniform of each slot.
            rivals: (N, k) ids whose probability is asked.
            own: read-outs of the sampler's own.
        """
        size = self.chunk(forward.law, bool(own))
        rivals = draws.new_empty(len(draws), 0) if rivals is None else rivals
        chunks = zip(*(tensor.split(size) for tensor in (hidden, rivals, streams, slots, draws)), strict=True)
        parts = []
        for start, (part, ids, *counters) in zip(range(0, len(draws), size), chunks):
            run = partial(own, part, start) if own else None
            parts.append(self._statistics(head, part, forward, ids, counters, run))
        return torch.cat(parts, dim=1).tolist()

    def chunk(self, law: Law, own: bool = False) -> int:
        """Slots whose logits fit the budget under this law; read-outs of one's own count as a law to draw from."""
        plain = law.temperature == 0 and law.judged != "filtered" and not own
        copies = GREEDY_COPIES if plain else SAMPLED_COPIES
        return max(1, self.bytes // (4 * self.vocab_size * copies))

    def _statistics(
        self,
        head: Head,
        hidden: torch.Tensor,
        forward: Forward,
        rivals: torch.Tensor,
        counters: Sequence[torch.Tensor],
        run: Callable[[torch.Tensor], list[torch.Tensor]] | None,
    ) -> torch.Tensor:
        """(3 to 5, and those of rivals and of ``run``, n) in float64, of (n, D) and (n, k)."""
        logits, law = head(hidden), forward.law
        own = logits.dtype
        logits = logits.to(torch.promote_types(own, torch.float32))  # the narrow copy is let go
        _rule_out(logits, law.banned)
        said = run(logits) if run else []
        token = self._draw(logits, law, counters)
        logits = _judged(logits, law)
        _rule_out(logits, law.unsure)
        if self.confidence_dtype == "model":
            logits = logits.to(own)  # exact: they were of it
        likely = _probabilities(logits, rivals)
        statistics = _in_dtype_of_model if self.confidence_dtype == "model" else _in_full
        columns = [token, *statistics(logits, token, forward.ask), *likely, *said]
        return torch.stack([column.double() for column in columns])

    def _draw(self, logits: torch.Tensor, law: Law, counters: Sequence[torch.Tensor]) -> torch.Tensor:
        """A token a slot, (n,); the mask id is out of the race here and back in the logits afterwards."""
        held = None
        if self.mask_id is not None:
            held = logits[:, self.mask_id].clone()
            logits[:, self.mask_id] = -torch.inf
        greedy = law.temperature == 0
        token = logits.argmax(-1) if greedy else sample(logits, law, uniforms(*counters))
        if held is not None:
            logits[:, self.mask_id] = held
        return token


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


def sample(logits: torch.Tensor, law: Law, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw, in the order of ids, from the tempered and filtered law.

    logits (n, V), uniform (n,) in (0, 1) -> (n,).
    """
    tempered = _filtered(_tempered(logits, law), law)
    cdf = tempered.softmax(-1).double().cumsum(-1)
    target = uniform.double() * cdf[:, -1]
    reached = torch.searchsorted(cdf, target[:, None])[:, 0]  # the first id to reach it: never one of probability 0
    return reached.clamp_(max=logits.shape[-1] - 1)  # a law that is not a number reaches nothing


def _judged(logits: torch.Tensor, law: Law) -> torch.Tensor:
    """Logits (n, V) of the law that confidence, margin and entropy are of."""
    if law.judged == "raw":
        return logits
    tempered = _tempered(logits, law) if law.temperature > 0 else logits
    return _filtered(tempered, law) if law.judged == "filtered" else tempered


def _tempered(logits: torch.Tensor, law: Law) -> torch.Tensor:
    return (logits - logits.amax(-1, keepdim=True)).div_(law.temperature)  # at most 0: no temperature overflows


def _filtered(logits: torch.Tensor, law: Law) -> torch.Tensor:
    for cut in (_within_nucleus, _best) if law.nucleus_first else (_best, _within_nucleus):
        logits = cut(logits, law)
    return logits


def _best(logits: torch.Tensor, law: Law) -> torch.Tensor:
    if law.top_k is None or law.top_k >= logits.shape[-1]:
        return logits
    least = logits.topk(law.top_k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def _within_nucleus(logits: torch.Tensor, law: Law) -> torch.Tensor:
    return logits if law.top_p is None or law.top_p == 1 else _nucleus(logits, law.top_p)


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most probable ids whose mass reaches ``top_p`` (Holtzman et al. 2020)."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1) - mass
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, before >= top_p)
    return logits.masked_fill(dropped, -torch.inf)


def uniforms(streams: torch.Tensor, slots: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """`samplers.state.uniform` for int64 tensors, bit for bit: float64 in (0, 1)."""
    bits = _mix(_mix(streams + slots) + draws)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64 in wrapping int64 arithmetic."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch shifts int64 arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
