"""DFlash (arXiv 2602.06036), its first public version: blocks drafted from the target's features, verified greedily.

It runs a round although the last wanted token is out, and neither clips its blocks nor its counts: `compat=dflash_v0`.
"""

from __future__ import annotations

from typing import Any

import pytest

from samplers import AutoregressiveSampler, DecodeState, DFlashSampler, Role
from tests import golden
from tests.golden import Case, Ours, Tally
from tests.shared import shared

pytestmark = pytest.mark.golden
CASES = golden.cases("dflash", "cases.json", model="target")


@pytest.mark.parametrize("max_rows", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_tokens_forwards_and_accepted_drafts_equal_the_authors(case: Case, max_rows: int, tally: Tally) -> None:
    ours, content = _ours(case), case.content
    assert golden.check(case, ours, max_rows, tally)
    for n, outcome in enumerate(golden.decode(case, ours, max_rows=max_rows)):
        counted = outcome.counts()
        assert (counted["nfe"], counted["nfe_draft"]) == (content["target_forwards"][n], content["draft_forwards"][n])
        if ours.sampler.draft_width:  # else nothing is verified
            emitted, theirs = [len(entry.decided) for entry in outcome.verified], content["acceptance_lengths"][n]
            assert len(emitted) == len(theirs)
            assert emitted[:-1] == theirs[: len(emitted) - 1] and emitted[-1] <= theirs[-1]


@pytest.mark.parametrize("case", [c for c in CASES if "ar_greedy" in c.values[0].content])
def test_plain_greedy_decoding_is_ours(case: Case) -> None:
    ours = _ours(case)
    plain = AutoregressiveSampler()
    for outcome, wanted in zip(golden.decode(case, ours, sampler=plain), case.content["ar_greedy"], strict=True):
        assert outcome.state is not None and outcome.state.tokens == wanted


@pytest.mark.parametrize("case", CASES)
def test_without_compat_the_tokens_are_the_same_for_no_more_forwards(case: Case) -> None:
    theirs, ours = _ours(case), _ours(case, compat=None)
    for before, after in zip(golden.decode(case, theirs), golden.decode(case, ours), strict=True):
        assert before.state is not None and after.state is not None
        assert _answer(before.state) == _answer(after.state)
        assert after.counts()["nfe"] <= before.counts()["nfe"]
        runs = [run for run in after.log if run.role is Role.TARGET]
        assert all(run.window + run.cached <= len(after.state.tokens) for run in runs)


def _ours(case: Case, compat: str | None = "dflash_v0") -> Ours:
    settings = case.settings
    options: dict[str, Any] = {
        "draft": str(shared("golden", "dflash", "draft")),
        "end_ids": settings["stop_token_ids"] or [],
    }
    sampler = DFlashSampler(draft_width=settings["block_size"] - 1, compat=compat)
    return Ours(sampler, settings["max_new_tokens"], options, output=_answer)


def _answer(state: DecodeState) -> list[int]:
    """Prompt and answer, up to the first end token."""
    for slot in state.canvas:
        if state.mask[slot]:
            return state.tokens[:slot]
        if state.tokens[slot] in state.model.end_ids:
            return state.tokens[: slot + 1]
    return state.tokens
