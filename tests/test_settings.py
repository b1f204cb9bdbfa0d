"""Effective settings: how the canvas is divided, which type an option has, and where each value came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from pipeline.errors import UserError
from pipeline.settings import Settings, resolve, sampler_class
from samplers import BlockDiffusionSampler, DecodeState, ModelFacts, Prediction, ThresholdSampler

FACTS = ModelFacts(vocab_size=32, mask_id=0, end_ids=frozenset({2}))


@dataclass(frozen=True, kw_only=True)
class Own(BlockDiffusionSampler):
    """A user's sampler with options of every kind."""

    method_name: ClassVar[str] = "own"
    greed: int = 1
    weight: float = 0.5
    label: str | None = None
    eager: bool = False
    table: tuple[int, ...] = ()

    def update_state(self, state: DecodeState, prediction: Prediction, step: int) -> None: ...


def settle(target: str = "samplers.ThresholdSampler", **options: Any) -> Settings:
    given = {key: value for key, value in options.items() if key not in ("gen_length", "model", "protocol", "drop")}
    node = OmegaConf.create({"_target_": target, "name": target.rpartition(".")[2], "method": None, **given})
    length, model = options.get("gen_length", 32), options.get("model", FACTS)
    keys = [f"sampler.{name}" for name in given]
    return resolve(node, length, model, options.get("protocol"), keys, drop_unused=options.get("drop", False))


def own(**options: Any) -> Settings:
    return settle(f"{__name__}.Own", **options)


@pytest.mark.parametrize(
    ("options", "canvas", "block", "steps"),
    [
        ({}, 32, 32, 32),
        ({"block_size": 8}, 32, 8, 32),
        ({"block_size": 16, "num_blocks": 1}, 16, 16, 16),  # the sketch's use: they set the canvas
        ({"num_blocks": 4}, 32, 8, 32),
        ({"tokens_per_step": 4}, 32, 32, 8),
        ({"block_size": 8, "steps": 16}, 32, 8, 16),
        ({"protocol": 8}, 32, 8, 32),
        ({"protocol": 8, "block_size": 16}, 32, 16, 32),
        ({"model": ModelFacts(32, 0, frozenset({2}), trained_block=4), "protocol": 8}, 32, 4, 32),
    ],
)
def test_the_canvas_is_divided_as_asked(options: dict[str, Any], canvas: int, block: int, steps: int) -> None:
    settings = settle(**options)
    assert (settings.gen_length, settings.values["block_size"], settings.values["steps"]) == (canvas, block, steps)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 12}, "gen_length=32 is not a multiple of sampler.block_size=12 .option.: use 24 or 36"),
        ({"block_size": 64}, "gen_length=32 is not a multiple of sampler.block_size=64 .option.: use 64"),
        ({"block_size": 0}, "sampler.block_size=0 is out of range"),
        ({"num_blocks": 0}, "sampler.num_blocks=0 is out of range"),
        ({"num_blocks": 5}, "sampler.num_blocks=5 does not divide dataset.gen_length=32: use 30 or 35"),
        ({"steps": 0}, "sampler.steps=0 is out of range"),
        ({"block_size": 16, "steps": 3}, "sampler.steps=3 does not divide evenly over 2 blocks .*: use 2 or 4"),
        ({"tokens_per_step": 5}, "sampler.tokens_per_step=5 does not divide dataset.gen_length=32"),
        ({"steps": 4, "tokens_per_step": 8}, "say the same thing twice"),
        ({"threshold": 1.5}, "sampler.threshold=1.5 is out of range"),
        ({"cache": "magic"}, "sampler.cache=magic is out of range: use one of none"),
        ({"remask_ratio": 0.5}, "sampler.remask_ratio=0.5 is not used by sampler=ThresholdSampler: .*threshold"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        settle(**options)


def test_every_value_says_where_it_came_from() -> None:
    settings = settle(threshold=0.3, tokens_per_step=4, protocol=8)
    assert settings.sources["threshold"] == "option"
    assert (settings.sources["steps"], settings.sources["block_size"]) == ("derived", "protocol")
    assert settings.sources["temperature"] == "default"
    assert settings.sources["gen_length"] == "protocol"
    assert settings.sources.keys() - {"gen_length"} == settings.values.keys() == ThresholdSampler.options()


def test_a_sweep_drops_what_a_sampler_does_not_use() -> None:
    facts = ModelFacts(32, None, frozenset({2}), attention="causal", attentions=frozenset({"causal"}), shift=1)
    settings = settle("samplers.AutoregressiveSampler", model=facts, threshold=0.3, temperature=0.7, drop=True)
    assert settings.dropped == {"threshold": 0.3} and settings.values["temperature"] == 0.7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"greed": "x"}, "sampler.greed=x does not fit: .*Integer"),
        ({"greed": 1.5}, "sampler.greed=1.5 does not fit"),
        ({"weight": "much"}, "sampler.weight=much does not fit: .*Float"),
        ({"eager": "perhaps"}, "sampler.eager=perhaps does not fit: .*bool"),
    ],
)
def test_options_of_a_users_own_sampler_have_the_types_of_its_fields(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        own(**options)


def test_values_take_the_type_of_their_field() -> None:
    values = own(weight=1, eager="true", label=7, table=[1, 2]).values
    assert (type(values["weight"]), values["eager"], values["label"]) == (float, True, "7")
    assert list(values["table"]) == [1, 2]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.Sampler", "nowhere.Sampler cannot be imported"),
        ("samplers.Law", "samplers.Law is no complete subclass of samplers.Sampler"),
        ("samplers.uniform", "samplers.uniform"),
    ],
)
def test_a_target_that_is_no_sampler_is_refused(target: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        sampler_class(target)
