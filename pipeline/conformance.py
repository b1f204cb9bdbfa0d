"""What must be true of every sampler, looked at on small random networks: the suite behind `pipeline.check`.

A property takes a `Trial`, that is a sampler in a `Situation`, and says what went wrong in words, or nothing. The
networks compute in whole numbers (`adapters.mixing`), so "the same" means the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from omegaconf import DictConfig

from adapters.mixing import MixingAdapter
from pipeline.engine import Engine, Outcome, Task
from pipeline.errors import UserError, one_line
from pipeline.ngrams import tables_of
from pipeline.settings import Settings, resolve, sampler_class
from samplers import BlockDiffusionSampler, DecodeState, ModelFacts, stream_key

VOCABULARY, END, MASK = 13, 11, 12
HOT = 0.9  # temperature at which draws are looked at
_FULL = ModelFacts(VOCABULARY, MASK, frozenset({END}), attentions=frozenset({"full", "blocks"}))
_BLOCKS = replace(_FULL, attention="blocks", attentions=frozenset({"blocks"}), block_origin="zero")
_CAUSAL = replace(_FULL, mask_id=None, shift=1, attention="causal", attentions=frozenset({"causal"}))
_PAIR = replace(_CAUSAL, draft=replace(_FULL, attentions=frozenset({"full"}), trained_block=4))
MODELS = {
    "full attention": _FULL,
    "full attention, read one row before": replace(_FULL, shift=1),
    "block-causal from position 0": _BLOCKS,
    "block-causal from position 0, read one row before": replace(_BLOCKS, shift=1),
    "block-causal from the prompt's end": replace(_BLOCKS, block_origin="prompt"),
    "causal": _CAUSAL,
    "causal, with a drafter": _PAIR,
    "causal, with a diffusion model as drafter": replace(_CAUSAL, draft=replace(_FULL, shift=1)),
    "causal, with a block diffusion model as drafter": replace(_CAUSAL, draft=replace(_BLOCKS, trained_block=4)),
    "canvases of noise": replace(_FULL, mask_id=None, attention="canvas", attentions=frozenset({"canvas"})),
}
_PLAIN = {"_target_": "samplers.AutoregressiveSampler", "name": "autoregressive"}
# the careful and the bold end of the rules that have one
LIMITS = (
    ({"threshold": 1.0, "low_threshold": 1.0}, {"threshold": 0.0, "low_threshold": 0.0}),
    ({"entropy_threshold": 0.0}, {"entropy_threshold": 1e6}),
    ({"entropy_budget": 0.0}, {"entropy_budget": 1e6}),
)


class BrokenError(Exception):
    """A run that came to no good end; says how."""


@dataclass(frozen=True)
class Situation:
    """A network, prompts, and how much is asked for in blocks of which size."""

    model: str  # one of MODELS
    prompts: tuple[tuple[int, ...], ...]
    block: int = 4
    blocks: int = 3
    seed: int = 0
    finds_end: bool = True  # whether the network knows an end token

    @property
    def facts(self) -> ModelFacts:
        facts = MODELS[self.model]
        return facts if self.finds_end else replace(facts, end_ids=frozenset())

    @property
    def asked(self) -> int:
        return self.block * self.blocks

    def words(self) -> str:
        prompts = ", ".join(str(list(prompt)) for prompt in self.prompts)
        several = "s" if len(self.prompts) > 1 else ""
        return f"{self.model}, network {self.seed}, {self.asked} tokens asked, prompt{several} {prompts}"

    def smaller(self) -> Iterator[Situation]:
        """Situations to look at next, if this one shows a fault."""
        if len(self.prompts) > 1:
            yield from (replace(self, prompts=(prompt,)) for prompt in sorted(self.prompts, key=len))
            yield from (
                replace(self, prompts=self.prompts[:i] + self.prompts[i + 1 :]) for i in range(len(self.prompts))
            )
        if self.blocks > 1:
            yield replace(self, blocks=self.blocks - 1)
        if self.block > 1:
            yield from (replace(self, block=size) for size in range(1, self.block))
        yield from (
            replace(self, prompts=(*self.prompts[:i], prompt[:-1], *self.prompts[i + 1 :]))
            for i, prompt in enumerate(self.prompts)
            if len(prompt) > self.facts.shift
        )


@dataclass
class Trial:
    """A sampler, as the ``sampler`` part of a configuration has it, in one situation."""

    options: dict[str, Any]
    at: Situation
    _settings: dict[tuple, Settings] = field(default_factory=dict)

    def words(self) -> str:
        """The situation with the settings that were chosen, but for defaults."""
        settings = self.settings()
        chosen = {name: value for name, value in settings.values.items() if settings.sources[name] != "default"}
        return f"{self.at.words()}, {', '.join(f'{name}={value}' for name, value in chosen.items())}"

    def settings(self, **changes: Any) -> Settings:
        """What the options come to here; ``changes`` come on top of them.

        Raises:
            UserError: if they do not fit this model or canvas.
        """
        key = tuple(sorted(changes.items()))
        if key not in self._settings:
            options: dict[Any, Any] = {**self.options, **self._sizes(), **changes}
            node = DictConfig(options)
            self._settings[key] = resolve(node, self.at.asked, self.at.facts, None, drop_unused=True)
        return self._settings[key]

    def _sizes(self) -> dict[str, Any]:
        """Sizes for a canvas as small as this one, of those that the sampler knows and the canvas does not give."""
        known, at = sampler_class(self.options["_target_"]).options(), self.at
        sizes: dict[str, Any] = {"num_blocks": self.options.get("num_blocks")}
        if "block_size" in known and sizes["num_blocks"] is None:
            sizes["block_size"] = at.block
        if "sub_block_size" in known:
            sizes["sub_block_size"] = max(1, at.block // 2)
        if "steps_per_block" in known:
            sizes["steps_per_block"] = at.block
        if parallel := self.options.get("tokens_per_step"):
            sizes["tokens_per_step"] = min(parallel, at.block)
        return sizes

    def has(self, **options: Any) -> bool:
        """Whether the sampler takes these options here."""
        try:
            return set(options) <= set(self.settings(**options).values)
        except UserError:
            return False

    @property
    def draws(self) -> bool:
        """Whether random numbers decide anything, by its options."""
        values = self.settings().values
        heats = (values.get("temperature"), values.get("order_temperature"))
        return any(heats) or values.get("order") == "random" or values.get("drafter") == "random"

    def decode(self, max_rows: int = 1, run: int = 0, backwards: bool = False, **changes: Any) -> Decoded:
        """Decode the prompts, in their order or backwards; ``run`` is the seed.

        Raises:
            BrokenError: if the sampler raises, does not end, or leaves what the engine does not take.
        """
        settings, at = self.settings(**changes), self.at
        adapter, tasks = MixingAdapter(at.facts, at.seed), []
        for i, prompt in enumerate(at.prompts):
            tasks.append(Task(i, list(prompt), settings.gen_length, stream_key(run, i), traced=True))
        ticks = Ticks(sum(self.bound(settings, len(prompt)) for prompt in at.prompts))
        engine = Engine(adapter, settings.sampler, max_rows, ticked=ticks, ngrams=tables_of(settings, None))
        try:
            slots = settings.slots(at.prompts, at.facts)
            outcomes = list(engine.decode(reversed(tasks) if backwards else tasks, slots))
        except Exception as error:
            raise error if isinstance(error, BrokenError) else BrokenError(f"it raised {one_line(error)}") from error
        for outcome in outcomes:
            if outcome.failure:
                raise BrokenError(f"prompt {outcome.task.prompt}: {outcome.error}")
        return Decoded(sorted(outcomes, key=lambda outcome: outcome.task.index), adapter)

    def bound(self, settings: Settings, prompt: int) -> int:
        """Forwards that any rule should do with: twice what one token a forward takes, and a few a block."""
        canvas = settings.sampler.canvas_length(prompt, settings.gen_length, self.at.facts)
        blocks = canvas // settings.values.get("block_size", canvas) + 2
        revising = settings.values.get("max_post_steps", 0)
        return 2 * (max(canvas, settings.values.get("steps", 0)) + blocks * (revising + 1))

    @cached_property
    def plain(self) -> Decoded:
        """One row in flight."""
        return self.decode()

    @cached_property
    def broken(self) -> str | None:
        """How the plain run broke, if it did: there is nothing then that another property could be looked at on."""
        try:
            _ = self.plain
        except BrokenError as broken:
            return str(broken)
        return None


@dataclass
class Decoded:
    """What became of a trial's prompts, in their order, and the network that ran."""

    outcomes: list[Outcome]
    adapter: MixingAdapter

    def states(self) -> list[DecodeState]:
        return [outcome.state for outcome in self.outcomes if outcome.state is not None]

    def answers(self) -> list[list[int]]:
        return [state.tokens[state.prompt_length :] for state in self.states()]

    def steps(self) -> list[list[dict[int, int]]]:
        """Of each prompt, the slots and tokens changed by each forward that changed any."""
        changed = ([{slot: token for slot, token, _ in record["changed"]} for record in o.trace] for o in self.outcomes)
        return [[step for step in steps if step] for steps in changed]

    def openings(self) -> list[list[list[int]]]:
        """Of each prompt, the open slots that each forward decided, for those that decided any."""
        found = []
        for state, steps in zip(self.states(), self.steps(), strict=True):
            open_slots, decided = set(state.canvas), []
            for step in steps:
                decided.append(
                    sorted(slot for slot in step if slot in open_slots and step[slot] != state.model.mask_id)
                )
                open_slots -= {slot for slot, token in step.items() if token != state.model.mask_id}
                open_slots |= {slot for slot, token in step.items() if token == state.model.mask_id}
            found.append([slots for slots in decided if slots])
        return found


class Ticks:
    """Counts the engine's rounds and ends a run that goes on and on."""

    def __init__(self, most: int) -> None:
        self.most, self.now = most, 0

    def __call__(self) -> None:
        self.now += 1
        if self.now > self.most:
            raise BrokenError(f"it had not ended after {self.most} forwards")


# ---- properties: what went wrong, or None ----------------------------------------------------------------------------


def ends(trial: Trial) -> str | None:
    """Within a bound of forwards, and with all that was asked for decided or behind a final end token."""
    for outcome in trial.plain.outcomes:
        if outcome.counts()["nfe"] > (most := trial.bound(trial.settings(), len(outcome.task.prompt))):
            return f"it made {outcome.counts()['nfe']} forwards, more than {most}"
    return None


def answers_in_words(trial: Trial) -> str | None:
    for state, answer in zip(trial.plain.states(), trial.plain.answers(), strict=True):
        end = next((i for i, token in enumerate(answer) if token in state.model.end_ids), len(answer))
        wrong = [token for token in answer[:end] if not 0 <= token < VOCABULARY or token == state.model.mask_id]
        if wrong:
            return f"the answer {answer} holds {wrong[0]}"
    return None


def keeps_the_prompt(trial: Trial) -> str | None:
    for prompt, state in zip(trial.at.prompts, trial.plain.states(), strict=True):
        if (now := state.tokens[: len(prompt)]) != list(prompt):
            return f"the prompt {list(prompt)} became {now}"
    return None


def changes_by_commit_alone(trial: Trial) -> str | None:
    """Every token got there by a method of the state, inside the canvas: so the model saw it, too."""
    for state, steps in zip(trial.plain.states(), trial.plain.steps(), strict=True):
        known = {slot: token for step in steps for slot, token in step.items()}
        if outside := [slot for slot in known if slot not in state.canvas]:
            return f"slot {outside[0]} lies outside the canvas {state.canvas} and was changed"
        for slot in state.canvas:
            if state.tokens[slot] != known.get(slot, 0 if state.model.mask_id is None else MASK):
                return f"slot {slot} holds {state.tokens[slot]}, which no commit put there"
    return None


def batch_equals_rows(trial: Trial) -> str | None:
    heats: list[dict[str, Any]] = [{}, {"temperature": HOT}] if trial.has(temperature=HOT) else [{}]
    for changes in heats:
        alone = trial.decode(**changes) if changes else trial.plain
        for rows, backwards in ((3, True), (8, False)):
            together = trial.decode(rows, backwards=backwards, **changes)
            for one, other in zip(alone.outcomes, together.outcomes, strict=True):
                if difference := _difference(one, other):
                    return f"prompt {one.task.prompt} with {rows} rows in flight, then alone: {difference}"
    return None


def _difference(one: Outcome, other: Outcome) -> str | None:
    assert one.state is not None and other.state is not None
    for what, alone, together in (
        ("tokens", one.state.tokens, other.state.tokens),
        ("forward of each commit", one.state.committed_at, other.state.committed_at),
        ("counts", one.counts(), other.counts()),
        ("forwards", one.log, other.log),
    ):
        if alone != together:
            return f"{what} {together}, {alone}"
    return None


def counts_what_is_called(trial: Trial) -> str | None:
    for decoded in (trial.plain, trial.decode(3)):
        counted, called = sum(len(outcome.log) for outcome in decoded.outcomes), len(decoded.adapter.forwards)
        if counted != called:
            return f"{counted} forwards were counted and {called} made"
    return None


def repeats_with_its_seed(trial: Trial) -> str | None:
    """Equal seeds give equal runs; another seed changes something if, and only if, something is drawn."""
    if trial.decode().steps() != trial.plain.steps():
        return "the same run twice gave two results"
    if not trial.draws and trial.decode(run=1).steps() != trial.plain.steps():
        return "another seed changed the result, though nothing is drawn at temperature 0"
    if not trial.has(temperature=HOT) or trial.settings().values.get("top_k") == 1:
        return None
    hot = trial.decode(temperature=HOT).steps()
    if hot != trial.decode(temperature=HOT).steps():
        return f"the same run twice gave two results at temperature {HOT}"
    if len(trial.at.prompts) > 2 and all(hot == trial.decode(run=n, temperature=HOT).steps() for n in (1, 2)):
        return f"three seeds gave the same results at temperature {HOT}"
    return None


def seals_blocks_in_order(trial: Trial) -> str | None:
    size = trial.settings().values["block_size"]
    for state, steps in zip(trial.plain.states(), trial.plain.steps(), strict=True):
        blocks, now = list(state.blocks(size)), 0
        open_slots = set(state.canvas)
        for step in steps:
            for slot, token in step.items():
                block = next(i for i, slots in enumerate(blocks) if slot in slots)
                if block < now:
                    return f"slot {slot} of block {block} was changed after block {now} had begun"
                if block > now and (left := sorted(open_slots & {i for b in blocks[:block] for i in b})):
                    return f"block {block} began while slot {left[0]} before it was open"
                now = block
                open_slots = open_slots | {slot} if token == MASK else open_slots - {slot}
    return None


def reads_stored_keys(trial: Trial) -> str | None:
    if trial.plain.adapter.misread:
        _, slot = trial.plain.adapter.misread[0]
        return f"slot {slot} was read from the cache and had not been stored"
    return None


def cache_changes_nothing(trial: Trial) -> str | None:
    tried: list[dict[str, Any]] = [{"temperature": HOT}, {"order": "random"}]
    for changes in ({}, *(each for each in tried if trial.has(**each, cache="block"))):
        without, cached = (trial.decode(cache=cache, **changes) for cache in ("none", "block"))
        for prompt, one, other in zip(trial.at.prompts, without.steps(), cached.steps(), strict=True):
            if one != other:
                return f"prompt {list(prompt)}{_said(changes)}: cache=block decided {other}, cache=none {one}"
    return None


def decodes_as_without_drafts(trial: Trial) -> str | None:
    """Of a sampler that calls itself lossless, at temperature 0, and up to the end token."""
    values = trial.settings().values
    cold: dict[str, Any] = {"temperature": 0.0} if values.get("temperature") else {}
    if "sampled_drafts" in values:
        cold["sampled_drafts"] = False
    drafted = trial.decode(**cold) if cold else trial.plain
    for prompt, answer, wanted in zip(
        trial.at.prompts, drafted.answers(), _without_drafts(trial, cold).answers(), strict=True
    ):
        if (ours := _ended(answer, trial.at.facts)) != (plain := _ended(wanted, trial.at.facts)):
            return f"prompt {list(prompt)}: with drafts {ours}, without them {plain}"
    return None


def _without_drafts(trial: Trial, cold: dict[str, Any]) -> Decoded:
    """What the sampler's drafts are to leave as it is."""
    values = trial.settings().values
    if trial.at.facts.attention == "causal":
        return Trial({**_PLAIN, "eos": values["eos"]}, trial.at).decode()
    return trial.decode(**cold, **_alone(values))


def _alone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Changes with which one forward is one step."""
    without = {"draft_width": 1, "adaptive": False}
    return {name: value for name, value in without.items() if name in values}


def _ended(answer: list[int], facts: ModelFacts) -> list[int]:
    """Up to the first end token, and that too."""
    return answer[: next((i + 1 for i, token in enumerate(answer) if token in facts.end_ids), len(answer))]


def _said(changes: dict[str, Any]) -> str:
    return "".join(f", {name}={value}" for name, value in changes.items())


def limits_of_threshold(trial: Trial) -> str | None:
    """The careful limit decides one slot of a block at a time; the bold one takes no more forwards that decide any."""
    trial = Trial(trial.options, replace(trial.at, finds_end=False))
    careful, bold = _limits(trial)
    slowly, quickly = trial.decode(**careful).openings(), trial.decode(**bold).openings()
    size = trial.settings().values.get("block_size", trial.at.asked)
    for state, steps in zip(trial.decode(**careful).states(), slowly, strict=True):
        blocks = list(state.blocks(size))
        for slots in steps:
            if several := [block for block in blocks if len(set(slots) & set(block)) > 1]:
                return f"with {_said(careful)[2:]} one forward decided {slots}, two of {several[0]} at once"
    few, many = sum(map(len, quickly)), sum(map(len, slowly))
    if few > many:
        return f"{few} forwards with {_said(bold)[2:]}, {many} with {_said(careful)[2:]}"
    return None


def _limits(trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    values = trial.settings().values
    for careful, bold in LIMITS:
        if values.get(next(iter(careful))) is not None:
            used = [name for name in careful if values.get(name) is not None]
            return {name: careful[name] for name in used} | _alone(values), {name: bold[name] for name in used}
    return {}, {}


def _limited(trial: Trial) -> bool:
    even = trial.settings().sources.get("steps", "default") == "default"
    # a canvas' last step decides all slots, whatever it is sure of, and a drafter's threshold decides none
    even = even and trial.at.facts.attention not in ("canvas", "causal")
    return even and bool(_limits(trial)[0]) and trial.has(**_limits(trial)[0]) and trial.has(**_limits(trial)[1])


def _in_blocks(trial: Trial) -> bool:
    return isinstance(trial.settings().sampler, BlockDiffusionSampler)


def _cached(trial: Trial) -> bool:
    return trial.has(cache="block") and trial.has(cache="none")


def _lossless(trial: Trial) -> bool:
    settings = trial.settings()
    return settings.sampler.lossless and (trial.at.facts.attention == "causal" or "draft_width" in settings.values)


class Property(NamedTuple):
    words: str
    fault: Callable[[Trial], str | None]
    applies: Callable[[Trial], bool] = lambda trial: True


PROPERTIES = (
    Property("ends, with every slot decided that an answer needs", ends),
    Property("no mask id in an answer", answers_in_words),
    Property("the prompt is untouched", keeps_the_prompt),
    Property("changes slots of the canvas only, by commit and remask", changes_by_commit_alone),
    Property("a batch equals its rows, in any order", batch_equals_rows),
    Property("counted forwards are those made", counts_what_is_called),
    Property("a seed repeats, another differs only where something is drawn", repeats_with_its_seed),
    Property("blocks seal in order", seals_blocks_in_order, _in_blocks),
    Property("reads no key that was not stored", reads_stored_keys),
    Property("cache=block changes no token and no order", cache_changes_nothing, _cached),
    Property("a threshold's two limits", limits_of_threshold, _limited),
    Property("what is decoded is what plain decoding gives", decodes_as_without_drafts, _lossless),
)


# ---- the suite -------------------------------------------------------------------------------------------------------


def fault_of(prop: Property, trial: Trial) -> str | None:
    """What a property says of a trial.

    A sampler that breaks does not end well, which is one fault; one that breaks only where a property looks has that's.
    """
    if trial.broken:
        return trial.broken if prop.fault is ends else None
    try:
        return prop.fault(trial) if prop.applies(trial) else None
    except BrokenError as broken:
        return str(broken)


def smallest(prop: Property, trial: Trial) -> Trial:
    """A trial with the same kind of fault, as small as leaving things out one by one makes it."""
    for at in trial.at.smaller():
        other = Trial(trial.options, at)
        if accepted(other) and fault_of(prop, other):
            return smallest(prop, other)
    return trial


def accepted(trial: Trial) -> bool:
    try:
        trial.settings()
    except UserError:
        return False
    return True


def situations(model: str, block: int = 4, seeds: Sequence[int] = (0,)) -> Iterator[Situation]:
    """Prompts of all lengths that matter: none, one slot, a block less one, a block, more."""
    shortest = MODELS[model].shift
    lengths = sorted({n for n in (0, 1, block - 1, block, block + 3) if n >= shortest})
    for seed in seeds:
        draw = random.Random(seed)
        prompts = tuple(tuple(draw.randrange(VOCABULARY) for _ in range(length)) for length in lengths)
        yield Situation(model, prompts, block, seed=seed)
