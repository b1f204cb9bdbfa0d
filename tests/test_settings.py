"""Effective settings: how the canvas is divided, which type an option has, and where each value came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from pipeline.compose import compose
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
        ({"tokens_per_step": 0}, "sampler.tokens_per_step=0 is out of range: use a whole number from 1 up"),
        ({"tokens_per_step": -1}, "sampler.tokens_per_step=-1 is out of range"),
        ({"factor": float("inf")}, "sampler.factor=inf is out of range: use a finite number"),
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


@pytest.mark.parametrize(
    ("words", "canvas", "block", "source"),
    [
        ((), 32, 32, "derived"),
        (("sampler.block_size=8",), 32, 8, "option"),  # the preset's one block gives way
        (("sampler.num_blocks=4",), 32, 8, "derived"),
        (("sampler.block_size=8", "sampler.num_blocks=2"), 16, 8, "option"),
        (("dataset.gen_length=64", "sampler.block_size=16"), 64, 16, "option"),
    ],
)
def test_a_presets_number_of_blocks_gives_way_to_a_block_size_that_is_given(
    words: tuple[str, ...], canvas: int, block: int, source: str
) -> None:
    cfg = compose(["model=toy", "sampler=dream", "dataset.gen_length=32", *words])
    given = [word.partition("=")[0] for word in words]
    settings = resolve(cfg.sampler, cfg.dataset.gen_length, FACTS, None, given)
    assert (settings.gen_length, settings.values["block_size"], settings.values["steps"]) == (canvas, block, canvas)
    asked = "option" if "dataset.gen_length" in given else "protocol"
    assert settings.sources["block_size"] == source
    assert settings.sources["gen_length"] == ("derived" if canvas == 16 else asked)


LENGTHS = [
    (("dataset.gen_length=64", "sampler.num_blocks=2", "sampler.block_size=16"), "that is 32, are two lengths"),
    (("dataset.gen_length=64", "sampler.num_blocks=4", "sampler.block_size=16"), None),
    (("sampler.num_blocks=2", "sampler.block_size=16"), None),  # the protocol's length gives way
    (("dataset.gen_length=64", "sampler.num_blocks=2"), None),
]


@pytest.mark.parametrize(("words", "said"), LENGTHS)
def test_a_length_that_is_given_never_gives_way_to_another(words: tuple[str, ...], said: str | None) -> None:
    cfg = compose(["model=toy", "sampler=threshold", *words])
    given = [word.partition("=")[0] for word in words]
    if said is None:
        resolve(cfg.sampler, cfg.dataset.gen_length, FACTS, None, given)
        return
    with pytest.raises(UserError, match=r"dataset.gen_length=64 and sampler.num_blocks=2 .*" + said):
        resolve(cfg.sampler, cfg.dataset.gen_length, FACTS, None, given)


def chosen(*words: str, model: ModelFacts = FACTS) -> Settings:
    """As on the command line."""
    cfg = compose(["model=toy", *words])
    return resolve(cfg.sampler, 32, model, None, [word.partition("=")[0] for word in words])


NULLS = [
    (("sampler=block_threshold",), "threshold", "needs a number$"),
    (("sampler=threshold",), "threshold", "needs a number with these settings"),
    (("sampler=dmax",), "threshold", "needs a number$"),
    (("sampler=credit",), "alpha", "needs a number$"),
    (("sampler=threshold",), "early_stop", "needs true or false$"),
    (("sampler=threshold",), "temperature", "needs a number$"),
]


@pytest.mark.parametrize(("words", "option", "said"), NULLS)
def test_null_that_an_option_cannot_be_is_refused(words: tuple[str, ...], option: str, said: str) -> None:
    name = words[0].partition("=")[2]
    with pytest.raises(UserError, match=rf"^sampler.{option}=null: sampler={name} {said}"):
        chosen(*words, f"sampler.{option}=null")


def test_null_is_taken_at_its_word_where_it_means_something() -> None:
    assert chosen("sampler=fast_dllm", "sampler.threshold=null", "sampler.factor=1.0").values["threshold"] is None
    assert chosen("sampler=llada21", "sampler.editing_threshold=null").values["editing_threshold"] is None
    static = chosen("sampler=llada2", "sampler.threshold=null")  # its class has another default
    assert static.values["threshold"] is None and static.sources["threshold"] == "option"
    trained = ModelFacts(32, 0, frozenset({2}), trained_block=8)
    assert chosen("sampler=dmax", "sampler.block_size=null", model=trained).values["block_size"] == 8
    assert chosen("sampler=block_threshold", "sampler.cache=null").sources["cache"] == "model"
    assert chosen("sampler=threshold", "sampler.steps=null", "sampler.top_k=null").values["steps"] == 32


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (("sampler=dparallel", "sampler.cache=dual"), FACTS),
        (("sampler=fast_dllm",), ModelFacts(32, None, frozenset({2}), attentions=frozenset({"causal"}))),
        (("sampler=llada21",), ModelFacts(32, None, frozenset({2}), attentions=frozenset({"causal"}))),
    ],
)
def test_a_refusal_bears_the_name_that_was_chosen(words: tuple[str, ...], model: ModelFacts) -> None:
    with pytest.raises(UserError) as refused:
        chosen(*words, model=model)
    method = sampler_class(compose(list(words[:1])).sampler._target_).method_name
    assert not re.search(rf"sampler={method}\b", str(refused.value))


def test_a_sweep_drops_what_a_sampler_does_not_use() -> None:
    facts = ModelFacts(32, None, frozenset({2}), attention="causal", attentions=frozenset({"causal"}), shift=1)
    settings = settle("samplers.AutoregressiveSampler", model=facts, threshold=0.3, temperature=0.7, drop=True)
    assert settings.dropped == {"threshold": 0.3} and settings.values["temperature"] == 0.7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"greed": "x"}, "sampler.greed=x does not fit: 'x' is not a whole number"),
        ({"greed": 1.5}, "sampler.greed=1.5 does not fit"),
        ({"weight": "much"}, "sampler.weight=much does not fit: 'much' is not a number"),
        ({"eager": "perhaps"}, "sampler.eager=perhaps does not fit: 'perhaps' is not true or false"),
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
        ("nowhere.Sampler", "nowhere.Sampler cannot be imported: ModuleNotFoundError: No module named 'nowhere'$"),
        (f"{__name__}.Mine", rf"{__name__} has no class Mine, it has Own$"),
        ("samplers.credit.Kredit", "samplers.credit has no class Kredit, it has CreditSampler$"),
        ("samplers.Law", "samplers.Law is no complete subclass of samplers.Sampler"),
        ("samplers.uniform", "samplers.uniform"),
    ],
)
def test_a_target_that_is_no_sampler_is_refused(target: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        sampler_class(target)
