"""Decoding algorithms, one method a file. Nothing here knows a tensor, a tokenizer, a clock or a counter."""

from samplers.autoregressive import AutoregressiveSampler
from samplers.base import BlockDiffusionSampler, Decoding, Sampler
from samplers.cache import CACHES, CachePolicy
from samplers.confidence import ConfidenceSampler
from samplers.forward import CAUSAL, FULL, Attend, Forward, Guidance, Kind, Law, Prediction, Role
from samplers.state import DecodeState, ModelFacts, stream_key, uniform
from samplers.threshold import ThresholdSampler

SAMPLERS: dict[str, type[Sampler]] = {
    cls.method_name: cls for cls in (ConfidenceSampler, ThresholdSampler, AutoregressiveSampler)
}

__all__ = [
    "CACHES",
    "CAUSAL",
    "FULL",
    "SAMPLERS",
    "Attend",
    "AutoregressiveSampler",
    "BlockDiffusionSampler",
    "CachePolicy",
    "ConfidenceSampler",
    "DecodeState",
    "Decoding",
    "Forward",
    "Guidance",
    "Kind",
    "Law",
    "ModelFacts",
    "Prediction",
    "Role",
    "Sampler",
    "ThresholdSampler",
    "stream_key",
    "uniform",
]
