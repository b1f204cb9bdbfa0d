"""Credit for what was predicted before: a token that the model keeps to is trusted earlier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import Decoding, refuse_unless
from samplers.block_threshold import BlockThresholdSampler
from samplers.forward import Prediction
from samplers.state import DecodeState

Credit = dict[int, dict[int, float]]  # by slot and id


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
        refuse_unless(self.alpha >= 0, "alpha", self.alpha, "0 or more")
        refuse_unless(self.boost_gamma >= 0, "boost_gamma", self.boost_gamma, "0 or more")
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
            raised = {id_: p[id_] * (1 + credit[slot][id_]) ** self.alpha for id_ in sorted(p)}
            token[slot] = max(raised, key=raised.__getitem__)
            confidence[slot] = raised[token[slot]] / (1 + sum(raised.values()) - sum(p.values()))
        return replace(prediction, token=token, confidence=confidence)
