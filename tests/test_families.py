"""Each family's checkpoint, in the layout its authors published, against a plain formula in float64.

The checks of a rule carry their own counterproof: run on a model that breaks the rule, they must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import Request
from adapters.description import describe
from adapters.loading import load
from adapters.places import TINY, ModelOptions
from adapters.transformer import TransformerAdapter
from pipeline.engine import Engine, Task
from samplers import CAUSAL, FULL, Attend, ConfidenceSampler, Forward
from tests import reference
from tests.forwards import logits, pattern, placed, request
from tests.layouts import LAYOUTS, write

LIMIT = 2e-5  # the formula is in float64, the network in float32
NOTICED = 1e-3
LENGTH = 22
TOKENS = torch.randint(0, 62, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
GRIDS = [Attend("blocks", 0, 4), Attend("blocks", 0, 8)]
ATTENDS = {"full": [FULL, Attend("blocks", 6, 5)], "causal": [CAUSAL], "blocks": GRIDS}
OWN = {
    **dict.fromkeys(("LLaDA", "LLaDA-MoE", "Dream"), "full"),
    **dict.fromkeys(("LLaDA2", "LLaDA2, experts merged", "Fast-dLLM v2", "SDAR", "SDAR-MoE"), "blocks"),
    "causal language model": "causal",
}


def loaded(folder: Path, **options: Any) -> TransformerAdapter:
    adapter = load(describe(ModelOptions("random", path=str(folder), **options)), torch.device("cpu"))
    assert isinstance(adapter, TransformerAdapter)
    return adapter


def difference(adapter: TransformerAdapter, folder: Path, attend: Attend) -> float:
    """Of all logits of a row to those of the formula on the checkpoint in ``folder``."""
    said = logits(placed(adapter, TOKENS), request(0, range(LENGTH), shift=adapter.facts.shift, attend=attend))[0]
    return (said - reference.logits(folder, TOKENS, pattern(attend, LENGTH))).abs().max().item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_the_plain_formula_under_every_pattern_the_family_serves(tmp_path: Path, name: str) -> None:
    adapter = loaded(write(tmp_path, name))
    assert adapter.facts.attention == OWN[name]
    for attend in ATTENDS[OWN[name]]:
        assert difference(adapter, tmp_path, attend) < LIMIT
    others = [attend for pattern, attends in ATTENDS.items() for attend in attends if pattern != OWN[name]]
    assert difference(adapter, tmp_path, ATTENDS[OWN[name]][0]) < NOTICED
    for attend in others:  # the counterproof: another pattern gives other logits
        said = logits(adapter, request(0, range(LENGTH), shift=adapter.facts.shift, attend=attend))[0]
        own = reference.logits(tmp_path, TOKENS, pattern(ATTENDS[OWN[name]][0], LENGTH))
        assert (said - own).abs().max() > NOTICED


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_with_an_index_and_a_tokenizer_load_alike(tmp_path: Path, name: str) -> None:
    whole = loaded(write(tmp_path / "whole", name)).model.state_dict()
    sharded = loaded(write(tmp_path / "sharded", name, shards=3, tokenizer=TINY / "llada"))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 3
    assert all(torch.equal(whole[key], tensor) for key, tensor in sharded.model.state_dict().items())


COMMON = {"rope_theta": 1e4, "rms_norm_eps": 1e-6}
LOST: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LAYOUTS, COMMON),
    **{name: {**COMMON, "num_experts_per_tok": 2} for name in ("LLaDA-MoE", "LLaDA2", "SDAR-MoE")},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in LOST.items() for key in keys])
def test_a_fact_of_the_configuration_that_gets_lost_is_noticed(tmp_path: Path, name: str, key: str) -> None:
    told = write(tmp_path / "told", name)
    lost = write(tmp_path / "lost", name, **{key: LOST[name][key]})
    attend = ATTENDS[OWN[name]][0]
    assert difference(loaded(told), told, attend) < LIMIT
    assert difference(loaded(lost), told, attend) > NOTICED


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """As in the smallest Fast-dLLM v2 and SDAR models."""
    for name in ("Fast-dLLM v2", "SDAR", "causal language model"):
        folder = write(tmp_path / name, name, tie_word_embeddings=True)
        assert difference(loaded(folder), folder, ATTENDS[OWN[name]][0]) < LIMIT


# ---- half-rotary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_llada2_turns_the_first_part_of_each_head_only(tmp_path: Path, factor: float) -> None:
    told = write(tmp_path / "told", "LLaDA2", partial_rotary_factor=factor)
    assert difference(loaded(told), told, GRIDS[0]) < LIMIT


@pytest.mark.parametrize("factor", [0.25, 1.0])
def test_the_check_of_half_rotary_fails_when_another_part_is_turned(tmp_path: Path, factor: float) -> None:
    told = write(tmp_path / "told", "LLaDA2")
    broken = write(tmp_path / "broken", "LLaDA2", partial_rotary_factor=factor)
    assert difference(loaded(broken), told, GRIDS[0]) > NOTICED


# ---- where a prediction is read --------------------------------------------------------------------------------------

SHIFTS = {"LLaDA": 0, "LLaDA-MoE": 0, "LLaDA2": 0, "SDAR": 0, "SDAR-MoE": 0, "Dream": 1, "Fast-dLLM v2": 1}


def misread(adapter: TransformerAdapter, folder: Path, shift: int) -> int:
    """Slots whose token or confidence is not what row ``slot - shift`` of the formula says; 15 slots are asked."""
    attend = ATTENDS[adapter.facts.attention][0]
    slots = range(5, 20)
    whole = Forward(range(LENGTH), slots, attend=attend)
    said = placed(adapter, TOKENS).forward([Request(0, whole, [], [])])[0]
    rows = reference.logits(folder, TOKENS, pattern(attend, LENGTH))
    confidences, wrong = rows.softmax(-1), 0
    rows[:, adapter.facts.mask_id] = -torch.inf
    for slot in slots:
        token = int(rows[slot - shift].argmax())
        confidence = confidences[slot - shift, token].item()
        right = said.token[slot] == token and abs(said.confidence[slot] - confidence) < LIMIT
        wrong += not right
    return wrong


@pytest.mark.parametrize(("name", "shift"), SHIFTS.items())
def test_a_slots_prediction_is_read_at_its_own_row_or_the_one_before(tmp_path: Path, name: str, shift: int) -> None:
    folder = write(tmp_path, name)
    adapter = loaded(folder)
    assert adapter.facts.shift == shift
    assert misread(adapter, folder, shift) == 0
    broken = loaded(folder, shift=1 - shift)
    assert broken.facts.shift == 1 - shift
    assert misread(broken, folder, shift) > 10


# ---- where blocks are counted from -----------------------------------------------------------------------------------


def decoded(folder: Path, shift: int, size: int, prompt: list[int]) -> list[int]:
    """Ten tokens after the prompt by the formula: blocks counted from position 0, the surest slot of a block first."""
    config = LAYOUTS["SDAR"].config
    tokens = [*prompt, *[config["mask_token_id"]] * 10]
    visible = pattern(Attend("blocks", 0, size), len(tokens))
    undecided = set(range(len(prompt), len(tokens)))
    for start in range(0, len(tokens), size):
        while block := [slot for slot in range(start, start + size) if slot in undecided]:
            rows = reference.logits(folder, tokens, visible)[[slot - shift for slot in block]]
            confidences = rows.softmax(-1)
            confidences[:, config["mask_token_id"]] = 0
            surest = int(confidences.amax(-1).argmax())
            tokens[block[surest]] = int(confidences[surest].argmax())
            undecided.remove(block[surest])
    return tokens


def differs(adapter: TransformerAdapter, folder: Path, shift: int, size: int) -> bool:
    """Whether the engine decodes other tokens than the formula; the prompt ends inside a block."""
    prompt = TOKENS[:6]
    outcomes = Engine(adapter, ConfidenceSampler(block_size=size, steps=10), max_rows=1).decode(
        [Task(0, prompt, 10)], 16
    )
    state = next(iter(outcomes)).state
    assert state is not None
    return state.tokens != decoded(folder, shift, size, prompt)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize(("name", "shift"), [("SDAR", 0), ("LLaDA2", 0), ("Fast-dLLM v2", 1)])
def test_blocks_are_counted_from_position_0(tmp_path: Path, name: str, shift: int, size: int) -> None:
    folder = write(tmp_path, name)
    adapter = loaded(folder)
    assert adapter.facts.block_origin == "zero"
    assert not differs(adapter, folder, shift, size)
    assert differs(loaded(folder, block_origin="prompt"), folder, shift, size)


# ---- routers ---------------------------------------------------------------------------------------------------------


def shares(adapter: TransformerAdapter, hidden: torch.Tensor) -> torch.Tensor:
    """(N, E): with what weight the last layer of a mixture hears each expert for hidden states (N, D)."""
    layer = adapter.model.model.layers[-1].mlp
    heard: list[tuple[torch.Tensor, ...]] = []
    hook = layer.experts.register_forward_pre_hook(lambda module, given: heard.append(given))
    with torch.inference_mode():
        layer(hidden[None])
    hook.remove()
    _, chosen, weights = heard[0]
    return torch.zeros(len(hidden), layer.gate.weight.shape[0]).scatter_(-1, chosen, weights)


def misrouted(adapter: TransformerAdapter, folder: Path, name: str) -> float:
    """Largest difference of the shares to the formula's, over 50 hidden states."""
    config, layer = LAYOUTS[name].config, LAYOUTS[name].config["num_hidden_layers"] - 1
    hidden = torch.randn(50, config["hidden_size"], generator=torch.Generator().manual_seed(5))
    weights = reference.under(reference.read(folder), f"model.layers.{layer}.mlp.gate.")
    if "expert_bias" in weights:
        wanted = reference.sigmoid_router(hidden.double(), weights["weight"], weights["expert_bias"], config)
    else:
        wanted = reference.softmax_router(hidden.double(), weights["weight"], config)
    return (shares(adapter, hidden) - wanted).abs().max().item()


def _bias_in_the_weights(gate: Any) -> None:
    def spoil(module: Any, given: Any, said: Any) -> Any:
        logits, _, chosen = said
        weights = (logits.sigmoid() + module.e_score_correction_bias).gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) * module.routed_scaling_factor, chosen

    gate.register_forward_hook(spoil)


def _no_groups(gate: Any) -> None:
    gate.num_group = gate.topk_group = 1


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda gate: setattr(gate, name, value)


BROKEN: dict[tuple[str, str], Callable[[Any], None]] = {
    ("LLaDA2", "the bias enters the weights"): _bias_in_the_weights,
    ("LLaDA2", "the bias is left out of the choice"): lambda gate: gate.e_score_correction_bias.zero_(),
    ("LLaDA2", "no limit on groups"): _no_groups,
    ("LLaDA2", "not normalised"): _set("norm_topk_prob", False),
    ("LLaDA2", "no scale"): _set("routed_scaling_factor", 1.0),
    ("LLaDA-MoE", "normalised"): _set("norm_topk_prob", True),
    ("SDAR-MoE", "not normalised"): _set("norm_topk_prob", False),
}


@pytest.mark.parametrize("name", ["LLaDA2", "LLaDA2, experts merged", "LLaDA-MoE", "SDAR-MoE"])
def test_the_router_chooses_and_weighs_as_the_formula_does(tmp_path: Path, name: str) -> None:
    assert misrouted(loaded(write(tmp_path, name)), tmp_path, name) < 1e-6


@pytest.mark.parametrize(("name", "rule"), BROKEN)
def test_the_check_of_the_router_fails_when_its_rule_is_broken(tmp_path: Path, name: str, rule: str) -> None:
    adapter = loaded(write(tmp_path, name))
    BROKEN[name, rule](adapter.model.model.layers[-1].mlp.gate)
    assert misrouted(adapter, tmp_path, name) > 0.01


@pytest.mark.parametrize("stated", [True, False, None])
def test_llada2_normalises_and_llada_moe_does_not_whatever_the_configuration_says(
    tmp_path: Path, stated: bool | None
) -> None:
    """As their authors' codes do; SDAR-MoE goes by its configuration."""
    for name in ("LLaDA2", "LLaDA-MoE"):
        folder = write(tmp_path / name, name, norm_topk_prob=stated)
        assert misrouted(loaded(folder), folder, name) < 1e-6


def test_equal_scores_go_to_the_experts_that_topk_names(tmp_path: Path) -> None:
    """All scores are 1/2 and the bias takes three values, so that groups and experts tie exactly."""
    adapter = loaded(write(tmp_path, "LLaDA2"))
    gate, config = adapter.model.model.layers[-1].mlp.gate, LAYOUTS["LLaDA2"].config
    bias = torch.tensor([0.0, 0.5, 0.25, 0.5] * 4)
    with torch.no_grad():
        gate.weight.zero_()
        gate.e_score_correction_bias.copy_(bias)
    hidden = torch.ones(3, config["hidden_size"])
    wanted = reference.sigmoid_router(hidden.double(), gate.weight.double(), bias.double(), config)
    assert torch.equal(shares(adapter, hidden).double(), wanted)
    last = reference.sigmoid_router(hidden.double(), gate.weight.double(), bias.double().flip(0), config).flip(-1)
    assert not torch.equal(last, wanted)  # the counterproof: ties broken from the other end
