"""The family table: how a published checkpoint maps onto a native `transformers` architecture, and how it decodes.

A new family is one more `Family` in `FAMILIES`; the first whose recogniser says yes is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adapters import assumptions, layouts
from adapters.assumptions import Assumed
from adapters.keys import NAMING, refuse_wrong
from adapters.tensors import Json, Rule


def stated(key: str, otherwise: int | None = None) -> Callable[[Json], int | None]:
    """Reads a key of ``config.json``; ``otherwise`` is what the family's published code has built in."""

    def read(config: Json) -> int | None:
        value: int | None = config.get(key)
        return otherwise if value is None else value

    return read


def absent(config: Json) -> int | None:
    """For what a family does not have."""
    return None


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: shown to the user.
        recognises: whether a ``config.json`` is of this family.
        attention: the pattern it was trained with: ``full``, ``causal``, ``blocks`` or ``canvas``.
        shift: row of the prediction for slot i is ``i - shift``.
        native: the native architecture's configuration, as arguments of `transformers.AutoConfig.for_model`; None where
            the file already is a native configuration.
        assumes: keys of ``config.json`` that may hold these values only, see `adapters.assumptions`.
        rules: where the checkpoint's tensors go, see `adapters.tensors`.
        block_origin: ``prompt`` or ``zero``, see `samplers.ModelFacts`.
        mask_id, trained_block: read out of ``config.json``.
        end_ids: ends of an answer, where neither configuration nor tokenizer names any.
        chat_template: Jinja, for a tokenizer that brings none.
        adapter: what runs it, by its name in `adapters.loading`.
    """

    name: str
    recognises: Callable[[Json], bool]
    attention: str
    shift: int
    native: Callable[[Json], dict[str, Any]] | None = None
    assumes: Assumed = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    block_origin: str = "prompt"
    mask_id: Callable[[Json], int | None] = absent
    trained_block: Callable[[Json], int | None] = absent
    end_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    adapter: str = "transformer"


SERVED = {  # patterns that a model of a pattern can decode with: a mask can always hide more than the training did
    "full": frozenset({"full", "blocks"}),
    "blocks": frozenset({"blocks"}),
    "causal": frozenset({"causal"}),
    "canvas": frozenset({"canvas"}),  # causal when stored, full when denoised: DiffusionGemma's own
}

_HEADERS = (  # LLaDA's
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML = (  # Qwen's, without its default system message
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _of_type(*model_types: str) -> Callable[[Json], bool]:
    return lambda config: config.get("model_type") in model_types


def _is_llada_moe(config: Json) -> bool:
    """LLaDA-MoE shares its ``model_type`` with LLaDA."""
    return config.get("model_type") in ("llada", "lladamoe", "llada_moe") and "num_experts" in config


FAMILIES: tuple[Family, ...] = (
    Family(
        name="LLaDA-MoE",
        recognises=_is_llada_moe,
        native=layouts.llada_moe,
        assumes=assumptions.LLADA_MOE,
        rules=layouts.EXPERT_RULES,
        attention="full",
        shift=0,
        mask_id=stated("mask_token_id", 156895),
    ),
    Family(
        name="LLaDA",
        recognises=_of_type("llada"),
        native=layouts.llada,
        assumes=assumptions.LLADA,
        rules=layouts.LLADA_RULES,
        attention="full",
        shift=0,
        mask_id=stated("mask_token_id", 126336),
        chat_template=_HEADERS,
    ),
    Family(
        name="LLaDA2",
        recognises=_of_type("llada2_moe", "llada2_moe_veomni"),
        native=layouts.llada2,
        assumes=assumptions.LLADA2,
        rules=layouts.LLADA2_RULES,
        attention="blocks",
        shift=0,
        block_origin="zero",
        mask_id=stated("mask_token_id", 156895),
        trained_block=stated("block_size", 32),
        end_ids=frozenset({156892}),
    ),
    Family(
        name="Dream",
        recognises=_of_type("Dream", "dream"),
        native=layouts.qwen2,
        assumes=assumptions.QWEN2,
        attention="full",
        shift=1,
        mask_id=stated("mask_token_id", 151666),
        chat_template=_CHATML,
    ),
    Family(
        name="Fast-dLLM v2",
        recognises=_of_type("Fast_dLLM_Qwen"),
        native=layouts.qwen2,
        assumes=assumptions.QWEN2,
        attention="blocks",
        shift=1,
        block_origin="zero",
        mask_id=stated("mask_token_id", 151665),
        chat_template=_CHATML,
        trained_block=stated("bd_size", 32),
    ),
    Family(
        name="SDAR-MoE",
        recognises=_of_type("sdar_moe"),
        native=layouts.qwen3_moe,
        assumes=assumptions.QWEN3_MOE,
        rules=layouts.EXPERT_RULES,
        attention="blocks",
        shift=0,
        block_origin="zero",
        mask_id=stated("mask_token_id", 151669),
        chat_template=_CHATML,
        trained_block=stated("block_size", 4),
    ),
    Family(
        name="SDAR",
        recognises=_of_type("sdar"),
        native=layouts.qwen3,
        assumes=assumptions.QWEN3,
        attention="blocks",
        shift=0,
        block_origin="zero",
        mask_id=stated("mask_token_id", 151669),
        chat_template=_CHATML,
        trained_block=stated("block_size", 4),
    ),
    Family(
        name="DiffusionGemma",
        recognises=_of_type("diffusion_gemma"),
        adapter="diffusion_gemma",
        attention="canvas",
        shift=0,
        trained_block=stated("canvas_length", 256),
    ),
    Family(
        name="masked diffusion on a native architecture",
        recognises=lambda config: config.get("is_causal") is False and config.get("mask_token_id") is not None,
        attention="full",
        shift=0,
        mask_id=stated("mask_token_id"),
    ),
    Family(
        name="causal language model",
        recognises=lambda config: any("CausalLM" in name for name in config.get("architectures") or ()),
        attention="causal",
        shift=1,
    ),
)


def language_part(config: Json) -> dict[str, Any]:
    """What a configuration says of the language model; a multimodal one nests it."""
    return {**(config.get("text_config") or {}), **config}


def family_of(config: Json) -> Family:
    """The family of a ``config.json``.

    Raises:
        ValueError: if no row recognises it, or it is of a drafter.
    """
    refuse_wrong(config, NAMING)
    if drafters := [name for name in config.get("architectures") or () if name.endswith("DraftModel")]:
        raise ValueError(f"{drafters[0]} is a drafter: it decodes only beside a target model, not as the model itself")
    for family in FAMILIES:
        if family.recognises(config):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ValueError(f"model_type={config.get('model_type')} is of no known family; known are: {known}")
