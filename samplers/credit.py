"""Credit for what was predicted before: a token that the model keeps to is trusted earlier."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import Decoding, refuse_unless
from samplers.block_threshold import BlockThresholdSampler
from samplers.forward import Prediction
from samplers.state import DecodeState

Credit = dict[int, dict[int, float]]  # by slot and id
LARGEST = 500.0  # natural logarithm of the largest factor that is computed with: a float ends at 709


@dataclass(frozen=True, kw_only=True)
class CreditSampler(BlockThresholdSampler):
    """The threshold rule on logits that are raised by the credit of their ids.

    dInfer's credit decoder (arXiv 2510.08666). Each step decays the credit C of a slot's ids by `decay_beta` and gives
    its likeliest id ``p ** boost_gamma`` more; token and confidence are then of ``logits + alpha * log(1 + C)``, that
    is of a law in proportion to ``p * (1 + C) ** alpha``.

    Attributes:
        alpha: weight of the credit; 0 is the threshold rule.
        boost_gamma: 0 gives every likeliest id the same credit, 1 its probability.
        decay_beta: share of the credit that is left after a step, 0..1.
    """

    method_name: ClassVar[str] = "credit"

    alpha: float = 0.7
    boost_gamma: float = 0.2
    decay_beta: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 <= self.alpha < math.inf, "alpha", self.alpha, "0, or a finite number above it")
        gamma = self.boost_gamma
        refuse_unless(0 <= gamma < math.inf, "boost_gamma", gamma, "0, or a finite number above it")
        refuse_unless(0 <= self.decay_beta <= 1, "decay_beta", self.decay_beta, "a share, 0 to 1")
        refuse_unless(self.temperature == 0, "temperature", self.temperature, "0: the raised law is not sampled from")

    @classmethod
    def options(cls) -> frozenset[str]:
        return super().options() - {"temperature", "top_k", "top_p"}

    def decode(self, state: DecodeState) -> Decoding:
        credit: Credit = {}
        decoding = super().decode(state)
        forward = next(decoding, None)
        while forward is not None:
            rivals = {slot: tuple(credit[slot]) for slot in forward.want if slot in credit}
            prediction = yield replace(forward, rivals=rivals)
            self._give(credit, prediction)
            try:
                forward = decoding.send(self._raised(credit, prediction))
            except StopIteration:
                return

    def _give(self, credit: Credit, prediction: Prediction) -> None:
        for slot in prediction.positions:
            of = {id_: self.decay_beta * value for id_, value in credit.get(slot, {}).items()}
            token = prediction.token[slot]
            of[token] = of.get(token, 0.0) + prediction.confidence[slot] ** self.boost_gamma
            credit[slot] = of

    def _raised(self, credit: Credit, prediction: Prediction) -> Prediction:
        """The prediction under the raised law, whose likeliest id is one that has credit."""
        token, confidence = {}, {}
        for slot in prediction.positions:
            p = {prediction.token[slot]: prediction.confidence[slot], **prediction.rivals.get(slot, {})}
            token[slot], confidence[slot] = self._surest(p, credit[slot])
        return replace(prediction, token=token, confidence=confidence)

    def _surest(self, p: dict[int, float], credit: dict[int, float]) -> tuple[int, float]:
        """The likeliest of some ids under the raised law, and its probability; ``p`` are theirs under the raw one."""
        logarithms = {id_: self.alpha * math.log1p(credit[id_]) for id_ in p}
        least = max(0.0, max(logarithms.values()) - LARGEST)  # taken from all, the other ids' too
        raised = {id_: p[id_] * math.exp(logarithms[id_] - least) for id_ in sorted(p)}
        token = max(raised, key=raised.__getitem__)
        total = math.exp(-least) * (1 - sum(p.values())) + sum(raised.values())
        return token, raised[token] / total if total else p[token]
