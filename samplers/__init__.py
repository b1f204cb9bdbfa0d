"""Decoding algorithms, one method a file. Nothing here knows a tensor, a tokenizer, a clock or a counter."""

from samplers.autoregressive import AutoregressiveSampler
from samplers.base import BlockDiffusionSampler, Decoding, Sampler
from samplers.block_threshold import BlockThresholdSampler
from samplers.cache import CACHES, CachePolicy
from samplers.confidence import ConfidenceSampler
from samplers.credit import CreditSampler
from samplers.d2f import D2FSampler
from samplers.d3llm import D3LLMSampler
from samplers.dflash import DFlashSampler
from samplers.diffusion_gemma import DiffusionGemmaSampler
from samplers.dmax import DMaxSampler
from samplers.dream import DreamSampler
from samplers.entropy_bound import EntropyBoundSampler
from samplers.failfast import FailFastSampler
from samplers.fast_dllm_dream import FastDLLMDreamSampler
from samplers.fast_dllm_v2 import FastDLLMV2Sampler
from samplers.forward import CAUSAL, FULL, Attend, Forward, Guidance, Kind, Law, Prediction, Role, Soft
from samplers.hierarchy import HierarchySampler
from samplers.llada2 import Llada2Sampler
from samplers.multibd import MultiBDSampler
from samplers.ngram import NGram
from samplers.quota import QuotaSampler
from samplers.sdar import SdarSampler
from samplers.speculative import SpeculativeSampler
from samplers.state import DecodeState, ModelFacts, stream_key, uniform
from samplers.threshold import ThresholdSampler

SAMPLERS: dict[str, type[Sampler]] = {
    cls.method_name: cls
    for cls in (
        ConfidenceSampler,
        D2FSampler,
        D3LLMSampler,
        MultiBDSampler,
        DFlashSampler,
        DiffusionGemmaSampler,
        DMaxSampler,
        DreamSampler,
        EntropyBoundSampler,
        FastDLLMDreamSampler,
        FastDLLMV2Sampler,
        ThresholdSampler,
        BlockThresholdSampler,
        CreditSampler,
        HierarchySampler,
        AutoregressiveSampler,
        SdarSampler,
        Llada2Sampler,
        SpeculativeSampler,
        FailFastSampler,
    )
}

__all__ = [
    "CACHES",
    "CAUSAL",
    "FULL",
    "SAMPLERS",
    "Attend",
    "AutoregressiveSampler",
    "BlockDiffusionSampler",
    "BlockThresholdSampler",
    "CachePolicy",
    "ConfidenceSampler",
    "CreditSampler",
    "D2FSampler",
    "D3LLMSampler",
    "DFlashSampler",
    "DMaxSampler",
    "DecodeState",
    "Decoding",
    "DiffusionGemmaSampler",
    "DreamSampler",
    "EntropyBoundSampler",
    "FailFastSampler",
    "FastDLLMDreamSampler",
    "FastDLLMV2Sampler",
    "Forward",
    "Guidance",
    "HierarchySampler",
    "Kind",
    "Law",
    "Llada2Sampler",
    "ModelFacts",
    "MultiBDSampler",
    "NGram",
    "Prediction",
    "QuotaSampler",
    "Role",
    "Sampler",
    "SdarSampler",
    "Soft",
    "SpeculativeSampler",
    "ThresholdSampler",
    "stream_key",
    "uniform",
]
