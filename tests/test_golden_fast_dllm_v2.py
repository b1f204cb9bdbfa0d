"""Fast-dLLM v2: token for token and forward for forward as the authors' code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapters.base import DeviceAdapter, Request
from samplers import Attend, DecodeState, FastDLLMV2Sampler, Forward, Kind, Prediction
from tests.golden import Case, Ours, Tally, adapter_of, cases, check, decode
from tests.shared import shared

FAST_DLLM_V2 = cases("fastdllm_v2", "cases.json")
EXACT = [p for p in FAST_DLLM_V2 if not (p.values[0].batched or p.values[0].settings["use_block_cache"])]
# `batch_sample` runs a sub-block alone only if that suits all its rows: this one's cached keys are refreshed where they
# would not be by itself, and slot 22 turns over. In lock-step it is equal, see below.
IN_LOCK_STEP = ("fdv2_batch_blockcache_t0.5_6", 2)


def ours(case: Case) -> Ours:
    settings, stop = case.settings, case.settings["stop_token"]
    sampler = FastDLLMV2Sampler(
        block_size=settings["block_size"],
        sub_block_size=settings["small_block_size"],
        threshold=settings["threshold"],
        cache="dual" if settings["use_block_cache"] else "block",
        compat="fast_dllm_v2",
    )

    def answer(state: DecodeState) -> list[int]:
        """Up to the first stop token that the model wrote."""
        prompt, tokens = state.prompt_length, state.tokens
        return tokens[: tokens.index(stop, prompt) + 1] if stop in tokens[prompt:] else tokens

    return Ours(sampler, settings["max_new_tokens"], {"end_ids": [stop]}, answer)


@pytest.mark.golden
@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("case", FAST_DLLM_V2)
def test_tokens_and_forwards_equal_the_authors(case: Case, max_rows: int, tally: Tally) -> None:
    name, row = IN_LOCK_STEP
    check(case.without(0, row) if case.name == name else case, ours(case), max_rows, tally)


def test_golden_files_are_where_ci_has_them() -> None:
    assert len(FAST_DLLM_V2) >= 35, shared("golden", "fastdllm_v2", "cases.json")


def named(name: str) -> Case:
    (case,) = [param.values[0] for param in FAST_DLLM_V2 if param.values[0].name == name]
    return case


def said(adapter: DeviceAdapter, state: DecodeState, forward: Forward, row: int = 0) -> Prediction:
    changed, state.changes = state.changes, []
    (prediction,) = adapter.forward([Request(row, forward, changed, [state.tokens[slot] for slot in changed])])
    return prediction


@pytest.mark.golden
@pytest.mark.parametrize("case", EXACT)
def test_without_a_cache_and_without_their_faults_the_tokens_are_the_same(case: Case) -> None:
    """Keys of decided blocks are exact, and no case that binds runs into what `compat` keeps but for its length."""
    wish = ours(case)
    for kept in ("block", "none"):
        plain = replace(wish, sampler=replace(wish.sampler, compat=None, cache=kept))
        for outcome, prompt in zip(decode(case, plain), case.prompts(), strict=True):
            assert outcome.state is not None
            said = wish.output(outcome.state)
            assert all(one == other for one, other in zip(said, prompt.output, strict=False))
            assert len(said) >= len(prompt.output) or len(prompt.ids) % case.settings["block_size"]


@pytest.mark.golden
def test_a_prompt_of_one_block_is_left_out_as_published() -> None:
    """Its first block is all masks and sees nothing, so that rounding chooses among equals: their tokens are put in."""
    case = named("fdv2_b8_sb4_t0.5_len8")
    (prompt,), (output,), length = (*(case.content[name] for name in ("prompts", "output")), 41)
    adapter, sampler = adapter_of(case, ours(case)), ours(case).sampler
    state = DecodeState.masked(prompt, 32, adapter.facts, length=length - len(prompt))
    adapter.open(1, length)
    adapter.place(0, state.tokens, 0)
    decoding = sampler.decode(state)
    forward = next(decoding)
    shown = set(forward.context)
    for _ in range(case.content["forwards"][0] + 8):
        shown |= set(forward.window)
        prediction = said(adapter, state, forward)
        if forward.kind is Kind.DENOISE and forward.window.start == 8:
            first = state.mask[8]  # it and slot 9 are read at one row: both have what is said of 9
            prediction.token = {slot: output[8 if first else slot] for slot in prediction.token}
            prediction.confidence = {slot: 0.4 if first and slot > 9 else 0.5 for slot in prediction.token}
        try:
            forward = decoding.send(prediction)
        except StopIteration:
            break
    assert state.tokens == output and shown == set(range(8, 40))


@pytest.mark.golden
def test_in_lock_step_the_row_that_rests_on_its_neighbours_is_equal_too() -> None:
    case = named(IN_LOCK_STEP[0])
    for tokens, output in zip(lock_step(case), case.content["output"][0], strict=True):
        assert tokens[: len(output)] == output


def lock_step(case: Case) -> list[list[int]]:
    """The rows of `batch_sample` in step, without its end: a step runs the whole block if any row needs that."""
    prompts, wish = case.content["prompts"][0], ours(case)
    adapter, sampler = adapter_of(case, wish), wish.sampler
    assert isinstance(sampler, FastDLLMV2Sampler)
    size, sub = sampler.block_size, sampler.sub_block_size
    begin = min(map(len, prompts)) // size * size
    end = max(map(len, prompts)) // size * size + wish.length
    rows = [DecodeState.masked(p, wish.length, adapter.facts, length=end + 1 - len(p)) for p in prompts]
    adapter.open(len(rows), end + 1)
    for index, row in enumerate(rows):
        adapter.place(index, row.tokens, 0)

    def run(threshold: float, window: range, wanted: range, context: range) -> None:
        for index, row in enumerate(rows):
            want, attend = row.masked_in(wanted), Attend("blocks", 0, size)
            forward = Forward(window, want, context=context, store=window, attend=attend)
            prediction = said(adapter, row, forward, index)
            surest = max(want, key=prediction.confidence.__getitem__, default=None)
            for slot in want:
                if slot == surest or prediction.confidence[slot] > threshold:
                    row.commit(slot, prediction.token[slot])

    run(1.0, range(begin), range(0), range(0))
    for first in range(begin, end, size):
        block, kept = range(first, first + size), False
        for start in range(first, first + size, sub):
            part = range(start, start + sub)
            while any(row.masked_in(part) for row in rows):
                whole = not kept or any(row.mask[start] for row in rows)
                context = range(first if whole else block.stop)
                run(sampler.threshold, block if whole else part, part, context)
                kept = True
        run(1.0, block, range(block.stop, block.stop + 1), range(first))
    return [row.tokens for row in rows]
