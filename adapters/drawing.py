"""How a token is drawn from the logits of a slot: the law, its cut, and the one uniform that decides.

Shapes: n slots, V vocabulary.
"""

from __future__ import annotations

import torch

from samplers import Law


def law_of(logits: torch.Tensor, law: Law) -> torch.Tensor:
    """Probabilities (n, V) that tokens are drawn with: tempered and filtered; at temperature 0 the argmax has all."""
    if law.temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return filtered(tempered(logits, law), law).softmax(-1)


def drawn(law: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw, in the order of ids, from a law (n, V) that need not sum to 1; uniform (n,) in (0, 1)."""
    cdf = law.double().cumsum(-1)
    target = uniform.double() * cdf[:, -1]
    reached = torch.searchsorted(cdf, target[:, None])[:, 0]  # the first id to reach it: never one of probability 0
    return reached.clamp_(max=law.shape[-1] - 1)  # a law that is not a number reaches nothing


def judged(logits: torch.Tensor, law: Law) -> torch.Tensor:
    """Logits (n, V) of the law that confidence, margin and entropy are of."""
    if law.judged == "raw":
        return logits
    cooled = tempered(logits, law) if law.temperature > 0 else logits
    return filtered(cooled, law) if law.judged == "filtered" else cooled


def tempered(logits: torch.Tensor, law: Law) -> torch.Tensor:
    return (logits - logits.amax(-1, keepdim=True)).div_(law.temperature)  # at most 0: no temperature overflows


def filtered(logits: torch.Tensor, law: Law) -> torch.Tensor:
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
