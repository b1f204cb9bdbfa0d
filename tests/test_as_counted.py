"""Forwards and tokens as other projects count them, on logs written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.description import describe
from adapters.places import ModelOptions
from adapters.text import IdCodec, TokenizerCodec
from adapters.toy import TableAdapter
from pipeline.as_counted import FIELDS, PROJECTS, Decoded, as_counted, respelled, tokens_per_forward
from pipeline.engine import Engine, Run, Task
from samplers import BlockThresholdSampler, D3LLMSampler, DecodeState, Kind, ModelFacts, Role
from samplers.d3llm import UNCOUNTED
from samplers.rules import FILLED
from tests.commands import Here

WORD, END, MASK = 5, 8, 9
FACTS = ModelFacts(10, MASK, frozenset({END}))
OPEN = -1  # a slot that stays undecided


def log(**kinds: int) -> list[Run]:
    return [Run(Kind(kind), Role.TARGET, 4, 0) for kind, count in kinds.items() for _ in range(count)]


def sample(
    canvas: Sequence[int], runs: Sequence[Run], prompt: Sequence[int] = (WORD,) * 3, facts: ModelFacts = FACTS
) -> Decoded:
    state = DecodeState.masked(list(prompt), len(canvas), facts)
    for slot, token in enumerate(canvas, len(prompt)):
        if token != OPEN:
            state.commit(slot, token)
    first = list(canvas).index(OPEN) if OPEN in canvas else len(canvas)
    return Decoded(runs, state, list(canvas[:first]), respelled=2)


def counts(decoded: Decoded) -> dict[str, tuple[int | None, int | None]]:
    told = as_counted(decoded)
    return {project: (told[f"nfe_as_{project}"], told[f"tokens_as_{project}"]) for project in PROJECTS}


def test_each_project_counts_an_answer_with_a_word_behind_its_end_in_its_own_way() -> None:
    """Two words, an end token, a word, four ends: in 2 forwards of prefill, 5 steps and 1 that only stores."""
    decoded = sample([WORD, WORD, END, WORD, *[END] * 4], log(prefill=2, denoise=4, refresh=1, commit=1))
    assert counts(decoded) == {
        "fastdllm": (8, 2),  # the tokens are the text's, as told
        "d3llm": (8, 3),
        "dmax": (7, 3),  # prefill is one
        "diffulex": (8, 8),
        "llada2": (5, 3),  # neither prefill nor storing; the end token is returned
    }


def test_what_stays_undecided_is_no_token() -> None:
    early = sample([WORD, END, WORD, OPEN, OPEN], log(denoise=2))
    assert {name: tokens for name, (_, tokens) in counts(early).items()} == {
        **{"fastdllm": 2, "d3llm": 2, "dmax": 2},
        **{"diffulex": 3, "llada2": 2},
    }


def test_without_prefill_there_is_none_to_count_once() -> None:
    assert counts(sample([WORD] * 4, log(denoise=4)))["dmax"] == (4, 4)


def test_an_end_token_in_the_prompt_shortens_the_answer_in_dmax() -> None:
    decoded = sample([WORD] * 4, log(denoise=4), prompt=[WORD, END, WORD])
    assert counts(decoded)["dmax"] == (4, 3) and counts(decoded)["d3llm"] == (4, 4)


def test_whole_blocks_beyond_what_was_asked_for_are_tokens_but_where_the_answer_is_cut() -> None:
    decoded = replace(sample([WORD] * 8, log(denoise=4)), ids=[WORD] * 6)
    assert {name: tokens for name, (_, tokens) in counts(decoded).items()} == {
        **{"fastdllm": 2, "d3llm": 8, "dmax": 8},
        **{"diffulex": 8, "llada2": 6},
    }


def test_a_round_without_a_forward_counts_in_d3llm_alone() -> None:
    decoded = sample([WORD, END], log(denoise=2))
    decoded.state.notes[UNCOUNTED] += 1
    assert {name: nfe for name, (nfe, _) in counts(decoded).items()} == {**dict.fromkeys(PROJECTS, 2), "d3llm": 3}


def test_what_a_sampler_filled_by_itself_was_not_accepted_so_diffulex_has_no_tokens() -> None:
    decoded = sample([WORD, END, END], log(denoise=2))
    decoded.state.notes[FILLED] += 1
    assert counts(decoded)["diffulex"] == (2, None)


def test_fast_dllm_counts_no_forwards_where_rows_are_read_one_before_their_slot() -> None:
    shifted = counts(sample([WORD], log(denoise=1), facts=replace(FACTS, shift=1)))
    assert shifted["fastdllm"] == (None, None) and shifted["d3llm"] == (1, 1)


@pytest.mark.parametrize(
    "decoded",
    [
        sample([WORD], log(prefill=1, verify=1)),
        sample([WORD], [Run(Kind.DENOISE, Role.DRAFT, 4, 0)]),
        sample([WORD], log(denoise=1), facts=replace(FACTS, mask_id=None)),
    ],
    ids=["verified", "drafted", "autoregressive"],
)
def test_what_no_project_decodes_is_counted_by_none(decoded: Decoded) -> None:
    assert as_counted(decoded) == dict.fromkeys(FIELDS)


# ---- the run ---------------------------------------------------------------------------------------------------------


def test_sums_are_divided_in_fast_dllm_and_d3llm_and_ratios_averaged_in_the_others() -> None:
    few, many = {"nfe": 2, "tokens": 8}, {"nfe": 8, "tokens": 8}
    rows = [
        {"nfe_prefill": 1, **{f"{name}_as_{project}": n for project in PROJECTS for name, n in told.items()}}
        for told in (few, many)
    ]
    assert tokens_per_forward(rows) == {
        "tokens_per_forward_as_fastdllm": 16 / 10,
        "tokens_per_forward_as_d3llm": 16 / 10,
        "tokens_per_forward_as_dmax": (4 + 1) / 2,
        "tokens_per_forward_as_diffulex": (8 + 8 / 7) / 2,  # prefill is left out
        "tokens_per_forward_as_llada2": (4 + 1) / 2,
    }


def test_a_sample_without_one_of_the_numbers_leaves_the_run_without_the_figure() -> None:
    """Those that a sampler filled up are the short answers: a mean of the others would be no mean of the run."""
    known, filled = {"nfe_as_dmax": 2, "tokens_as_dmax": 6}, {"nfe_as_dmax": 2, "tokens_as_dmax": None}
    absent = {f"tokens_per_forward_as_{project}": None for project in PROJECTS}
    assert tokens_per_forward([known, known]) == {**absent, "tokens_per_forward_as_dmax": 3.0}
    assert tokens_per_forward([known, filled]) == tokens_per_forward([known, {}]) == tokens_per_forward([]) == absent


def test_a_sample_of_prefill_alone_has_no_ratio_in_diffulex() -> None:
    rows = [{"nfe_as_diffulex": nfe, "tokens_as_diffulex": 4, "nfe_prefill": 1} for nfe in (1, 3)]
    assert tokens_per_forward(rows)["tokens_per_forward_as_diffulex"] == 2.0


def test_one_trace_reads_as_a_ratio_of_its_own_in_each_project() -> None:
    """Prompt 100, canvas 256: 118 words and ends; 8 refreshes, 44 steps, 20 more behind the end, 8 that store."""
    canvas, steps = [*[WORD] * 118, *[END] * 138], log(refresh=8, denoise=64)
    cached = as_counted(replace(sample(canvas, [*steps, *log(commit=8)], [WORD] * 100), respelled=118))
    stored_nowhere = as_counted(replace(sample(canvas, steps, [WORD] * 100), respelled=118))
    figures = tokens_per_forward([{**cached, "nfe_prefill": 0}])
    assert {name.rpartition("_")[2]: round(figure or 0, 2) for name, figure in figures.items()} == {
        **{"fastdllm": 1.48, "d3llm": 1.48, "dmax": 1.48},
        **{"diffulex": 3.2, "llada2": 1.65},
    }
    assert (
        round(tokens_per_forward([{**stored_nowhere, "nfe_prefill": 0}])["tokens_per_forward_as_fastdllm"] or 0, 2)
        == 1.64
    )


# ---- tokens of the text, once more -----------------------------------------------------------------------------------


class Letters:
    """A tokenizer of letters with a start token, special ones ``<`` (the end) and ``~``, and ``th`` as one token."""

    chat_source = None

    def encode_raw(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [0, *map(ord, messages[0]["content"].replace("th", "þ"))]

    def decode(self, ids: Sequence[int], raw: bool = False) -> str:
        return "".join(chr(i) for i in ids if raw or chr(i) not in "<~")


@pytest.mark.parametrize(
    ("text", "stops", "tokens"),
    [
        ("pith", [], 1 + 3),  # decoded as four, spelled as three
        ("pith<<<", [], 1 + 3),
        ("pi<th<", [], 1 + 3),  # what stands behind an end token counts, the end token does not
        ("pi|th", ["|"], 1 + 2),
        ("a|b#c", ["#", "|"], 1 + 1),
        ("<<", [], 1),  # the start token remains
        ("pit~h~<", [], 1 + 6),  # a special token is one, and words don't reach over it
    ],
)
def test_tokens_of_the_text_are_counted_anew_up_to_the_stop_string(text: str, stops: list[str], tokens: int) -> None:
    assert respelled(Letters(), list(map(ord, text)), {ord("<")}, stops) == tokens  # type: ignore[arg-type]


def test_without_a_tokenizer_there_is_no_text_to_tokenize() -> None:
    assert respelled(IdCodec(10), [5, 5], {END}, []) is None


def test_text_that_the_tokenizer_cannot_spell_has_no_count() -> None:
    class Refuses(Letters):
        def encode_raw(self, messages: Sequence[dict[str, str]]) -> list[int]:
            raise ValueError("the text holds <s>, which this tokenizer cannot spell as text: take it out")

    assert respelled(Refuses(), [65], set(), []) is None  # type: ignore[arg-type]


# ---- what samplers note ----------------------------------------------------------------------------------------------


def logits(token: int, sure: float = 20.0) -> list[float]:
    return [sure if i == token else 0.0 for i in range(10)]


def test_d3llm_notes_its_closing_round_and_what_it_filled() -> None:
    adapter = TableAdapter(FACTS, lambda tokens, slot: logits(END if slot == 2 else WORD, 20.0 if slot < 3 else 1.0))
    sampler = D3LLMSampler(block_size=4, entropy_threshold=0.1, early_stop=True)
    (outcome,) = Engine(adapter, sampler).decode([Task(0, [WORD], 6)], 7)
    assert outcome.state is not None and outcome.state.tokens == [WORD, WORD, *[END] * 5]
    told = counts(Decoded(outcome.log, outcome.state, outcome.state.tokens[1:]))
    assert (told["d3llm"], told["dmax"], told["diffulex"]) == ((2, 1), (1, 1), (1, None))


def test_an_end_token_written_for_the_prompts_own_is_noted() -> None:
    facts = replace(FACTS, attention="blocks", attentions=frozenset({"blocks"}), block_origin="zero")
    adapter = TableAdapter(facts, lambda tokens, slot: logits(WORD))
    sampler = BlockThresholdSampler(block_size=4, steps=8, threshold=0.5, cache="block", compat="dinfer")
    (outcome,) = Engine(adapter, sampler).decode([Task(0, [END], 7)], 8)
    assert outcome.state is not None and outcome.state.notes[FILLED] == 1
    assert counts(Decoded(outcome.log, outcome.state, []))["diffulex"][1] is None


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_runs_files_hold_the_other_projects_figures(tmp_path: Path) -> None:
    here = Here(tmp_path)
    shape = ["dataset.limit=3", "logger=none", "run=r"]
    here("model=tiny", "sampler=threshold", *shape)
    rows, summary = here.run("r").rows, here.run("r").summary
    assert all(row[f"nfe_as_{project}"] == row["nfe"] for row in rows for project in PROJECTS)
    assert all(row["tokens_as_diffulex"] == row["canvas"] for row in rows)
    assert all(row["tokens_as_llada2"] == row["tokens"] + row["ended"] for row in rows)
    assert all(row["tokens_as_dmax"] == row["tokens_as_d3llm"] >= row["tokens"] for row in rows)
    assert all(row["tokens_as_fastdllm"] >= 1 for row in rows)
    nfe = [row["nfe"] for row in rows]
    assert summary["tokens_per_forward_as_d3llm"] == sum(row["tokens_as_d3llm"] for row in rows) / sum(nfe)
    mean = sum(row["canvas"] / row["nfe"] for row in rows) / len(rows)
    assert summary["tokens_per_forward_as_diffulex"] == pytest.approx(mean)
    assert json.loads((tmp_path / "outputs" / "r" / "summary.json").read_text()).keys() >= {
        f"tokens_per_forward_as_{project}" for project in PROJECTS
    }


def test_text_of_a_real_tokenizer_is_respelled_with_its_end_tokens_gone() -> None:
    description = describe(ModelOptions("tiny", path="tiny/llada"))
    codec, ends = description.codec, description.facts.end_ids
    assert isinstance(codec, TokenizerCodec)
    text = codec.encode_raw([{"role": "user", "content": "Tom has 3 pens. He has 7 left."}])
    end = min(ends)
    assert respelled(codec, [*text, end, end], ends, []) == len(text)
    assert respelled(codec, [*text, end, *text], ends, []) == 2 * len(text)
    assert respelled(codec, text, ends, [". He"]) < len(text)  # type: ignore[operator]
