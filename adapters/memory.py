"""What a native architecture holds, from its configuration alone: tensors, parameters, memory.

Nothing is built and neither torch nor transformers is imported, unless the architecture has no formula here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from adapters import decoder_sizes, gemma_sizes
from adapters.decoder_sizes import FORMULAS
from adapters.draft_config import tapped_layers
from adapters.gemma_sizes import Shapes
from adapters.tensors import Json

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GEMMA = "diffusion_gemma"  # and in `adapters.gemma_sizes`


@dataclass(frozen=True)
class Sizes:
    """A network's sizes.

    Attributes:
        shapes: of every tensor, by its key in the native ``state_dict``; a tied head is one of them.
        tied: key of the embedding that is the head as well; None if the head is a tensor of its own.
        slot: numbers that one slot's keys and values take in all layers together.
        experts, experts_per_token: of a layer that has them; None in a dense network.
        shared_experts: those that every token goes through.
        ignored: patterns of tensors that a file may hold and the architecture has no use for.
        complete: whether a file under native names holds these tensors and no others; else only loading tells.
    """

    architecture: str
    shapes: Shapes
    tied: str | None
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    slot: int
    experts: int | None = None
    experts_per_token: int | None = None
    shared_experts: int = 0
    ignored: tuple[str, ...] = ()
    complete: bool = True

    @cached_property
    def parameters(self) -> int:
        """Tied parameters count once, buffers not at all."""
        skipped = ("lm_head.weight",) if self.tied else ()
        counted = (name for name in self.shapes if name not in skipped and not name.endswith("correction_bias"))
        return sum(prod(self.shapes[name]) for name in counted)

    @cached_property
    def active(self) -> int:
        """Parameters that one token passes, embedding and head included."""
        if not self.experts or not self.experts_per_token:
            return self.parameters
        expert = sum(prod(shape) for name, shape in self.shapes.items() if ".experts." in name)
        return self.parameters - expert + expert * self.experts_per_token // self.experts

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights."""
        return self.parameters * BYTES[dtype]

    def cache_bytes(self, slots: int, dtype: str) -> int:
        """Memory of the keys and values of so many slots."""
        return self.slot * slots * BYTES[dtype]


def sizes(native: Json) -> Sizes:
    """Sizes of a native architecture.

    Args:
        native: arguments of `transformers.AutoConfig.for_model`.

    Raises:
        KeyError: if a key is absent.
        ValueError: if a size is none, or transformers refuses what has no formula here.
    """
    kinds = {**dict.fromkeys(FORMULAS, _by_formula), GEMMA: _of_gemma}
    return kinds.get(native["model_type"], _by_building)(native)


def draft_sizes(config: Json) -> Sizes:
    """Sizes of a DFlash drafter, whose layers are Qwen3's; embedding and head are its target's and not counted.

    Raises:
        KeyError: if a key is absent.
        ValueError: if a size is none, or it is no DFlash drafter that is served.
    """
    native = {**config, "model_type": "qwen3", "vocab_size": 1, "tie_word_embeddings": False}
    layers = _by_formula(native)
    lent = ("model.embed_tokens.weight", "lm_head.weight")
    own = {name.removeprefix("model."): shape for name, shape in layers.shapes.items() if name not in lent}
    hidden, taps = layers.hidden, len(tapped_layers(config))
    fusion = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,)}
    return replace(layers, architecture="DFlashDraftModel", shapes={**own, **fusion})


def _by_formula(native: Json) -> Sizes:
    decoder_sizes.refuse_sizes(native)
    heads, layers = native["num_attention_heads"], native["num_hidden_layers"]
    experts = native.get("n_routed_experts") or native.get("num_experts")
    keys, size = native.get("num_key_value_heads") or heads, decoder_sizes.head_size(native)
    return Sizes(
        architecture=native["model_type"],
        shapes=decoder_sizes.shapes(native),
        tied="model.embed_tokens.weight" if native.get("tie_word_embeddings") else None,
        layers=layers,
        hidden=native["hidden_size"],
        heads=heads,
        key_value_heads=keys,
        head_size=size,
        vocabulary=native["vocab_size"],
        slot=2 * layers * keys * size,
        experts=experts,
        experts_per_token=native["num_experts_per_tok"] if experts else None,
        shared_experts=native.get("n_shared_experts") or 0,
        ignored=decoder_sizes.IGNORED.get(native["model_type"], ()),
        complete=not experts,
    )


def _of_gemma(native: Json) -> Sizes:
    text = native["text_config"]
    decoder_sizes.refuse_sizes(text)
    return Sizes(
        architecture=GEMMA,
        shapes=gemma_sizes.shapes(text),
        tied="model.decoder.embed_tokens.weight",
        layers=text["num_hidden_layers"],
        hidden=text["hidden_size"],
        heads=text["num_attention_heads"],
        key_value_heads=text["num_key_value_heads"],
        head_size=text["head_dim"],
        vocabulary=text["vocab_size"],
        slot=gemma_sizes.slot_elements(text),
        experts=text["num_experts"],
        experts_per_token=text["top_k_experts"],
        complete=False,
    )


def _by_building(native: Json) -> Sizes:
    """An architecture without a formula is built on the meta device: seconds, but no memory."""
    import torch

    from adapters.checkpoints.converted import converts
    from adapters.native import build, first_line

    try:
        from transformers import AutoConfig

        config = AutoConfig.for_model(**native)
        model = build(config, torch.float32, torch.device("meta"))
    except Exception as error:  # transformers raises whatever its validators raise
        raise ValueError(f"transformers cannot build {native['model_type']}: {first_line(error)}") from error
    text = config.get_text_config().to_dict()
    heads, layers = text["num_attention_heads"], text["num_hidden_layers"]
    keys, size = text.get("num_key_value_heads") or heads, text.get("head_dim") or text["hidden_size"] // heads
    copies = set(model.all_tied_weights_keys) - {"lm_head.weight"}
    return Sizes(
        architecture=native["model_type"],
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in copies},
        tied=model.all_tied_weights_keys.get("lm_head.weight"),
        layers=layers,
        hidden=text["hidden_size"],
        heads=heads,
        key_value_heads=keys,
        head_size=size,
        vocabulary=text["vocab_size"],
        slot=2 * layers * keys * size,
        experts=text.get("num_experts") or text.get("num_local_experts"),
        experts_per_token=text.get("num_experts_per_tok") or text.get("top_k_experts"),
        ignored=tuple(model._keys_to_ignore_on_load_unexpected or ()),
        complete=not converts(model),
    )
