"""Each rule against traces worked by hand, on a model whose logits are a table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from adapters.readout import uniforms
from adapters.toy import TableAdapter, ToyMaskedLMAdapter
from pipeline.engine import Engine, Outcome, Task
from samplers import (
    AutoregressiveSampler,
    BlockDiffusionSampler,
    ConfidenceSampler,
    DecodeState,
    ModelFacts,
    Sampler,
    ThresholdSampler,
    stream_key,
    uniform,
)
from samplers.rules import due

WORD, EOS, EOT, MASK = 0, 1, 2, 3
DEC01_FACTS = ModelFacts(vocab_size=4, mask_id=MASK, end_ids=frozenset({EOS, EOT}))


def run(adapter: Any, sampler: Sampler, length: int, prompt: tuple[int, ...] = (), stream: int = 0) -> Outcome:
    (outcome,) = Engine(adapter, sampler, max_rows=1).decode(
        [Task(0, list(prompt), length, stream, traced=True)], len(prompt) + length
    )
    assert outcome.state is not None and outcome.failure is None, outcome.error
    return outcome


def tokens(outcome: Outcome) -> list[int]:
    assert outcome.state is not None
    return outcome.state.tokens


def steps(outcome: Outcome) -> list[dict[int, int]]:
    """Slots and tokens changed by each forward."""
    return [{slot: token for slot, token, _ in record["changed"]} for record in outcome.trace]


def log_probabilities(**probability: float) -> list[float]:
    """A row of 10 ids: ``p7=0.6`` gives id 7 that probability, the rest is shared evenly."""
    given = {int(name[1:]): value for name, value in probability.items()}
    rest = (1 - sum(given.values())) / (10 - len(given))
    return [math.log(given.get(i, rest)) for i in range(10)]


TEN = ModelFacts(vocab_size=10, mask_id=9, end_ids=frozenset({8}), attentions=frozenset({"full", "causal"}))


@pytest.mark.parametrize(("blocks", "ratio"), [(1, 2.0), (2, 4.0)])
def test_the_sketch_on_the_toy_gives_the_sketchs_tokens_and_figures(blocks: int, ratio: float) -> None:
    outcome = run(ToyMaskedLMAdapter(), ConfidenceSampler(block_size=16, steps=8, remask_ratio=0.5), 16 * blocks)
    assert tokens(outcome) == [3 + i % 125 for i in range(16 * blocks)]
    assert outcome.counts()["nfe"] == 8
    assert len(tokens(outcome)) / outcome.counts()["nfe"] == ratio


def test_threshold_and_autoregressive_counts_worked_by_hand() -> None:
    """The toy's best token has probability e^6.25 / (e^6.25 + 127 e^-8) > 0.9999: one forward a block of any size."""
    assert run(ToyMaskedLMAdapter(), ThresholdSampler(block_size=16, steps=16, threshold=0.9), 32).counts()["nfe"] == 2
    assert run(ToyMaskedLMAdapter(), ThresholdSampler(block_size=32, steps=32, threshold=1.0), 32).counts()["nfe"] == 32
    outcome = run(ToyMaskedLMAdapter(), AutoregressiveSampler(), 32)
    assert outcome.counts()["nfe"] == 32 and tokens(outcome) == [3 + i for i in range(32)]


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_eos_last_acts_on_the_confidence_at_any_temperature(temperature: float) -> None:
    """DEC-01: the end token is still proposed, but committed after the word."""
    table = {0: [0.0, 10.0, 0.0, 0.0], 1: [4.0, 0.0, 0.0, 0.0]}
    sampler = ConfidenceSampler(block_size=2, steps=2, eos="last", temperature=temperature)
    assert steps(run(TableAdapter(DEC01_FACTS, table), sampler, 2)) == [{1: WORD}, {0: EOS}]


def test_eos_never_is_not_even_proposed() -> None:
    table = {0: [0.0, 10.0, 5.0, 0.0], 1: [4.0, 0.0, 0.0, 0.0]}
    outcome = run(TableAdapter(DEC01_FACTS, table), ConfidenceSampler(block_size=2, steps=2, eos="never"), 2)
    assert tokens(outcome) == [WORD, WORD]


def test_the_mask_id_is_never_drawn() -> None:
    table = {0: [1.0, 0.0, 0.0, 50.0], 1: [1.0, 0.0, 0.0, 50.0]}
    for temperature in (0.0, 1.0):
        sampler = ConfidenceSampler(block_size=2, steps=2, temperature=temperature)
        assert MASK not in tokens(run(TableAdapter(DEC01_FACTS, table), sampler, 2, stream=5))


@pytest.mark.parametrize(
    ("undecided", "budget", "quotas"),
    [
        (16, 5, [4, 3, 3, 3, 3]),  # DEC-05 (e)
        (32, 5, [7, 7, 6, 6, 6]),
        (32, 40, [1] * 32 + [0] * 8),
        (256, 100, [3] * 56 + [2] * 44),
        (32, 16, [2] * 16),
    ],
)
def test_quotas_are_spread_evenly_larger_first(undecided: int, budget: int, quotas: list[int]) -> None:
    spread = []
    for step in range(budget):
        spread.append(due(undecided, budget - step))
        undecided -= spread[-1]
    assert spread == quotas and undecided == 0


def test_the_step_budget_is_exact_and_every_mask_is_filled() -> None:
    """DEC-05 (a): 64 slots in blocks of 16, 8 steps; what is reported is what was called."""
    adapter = TableAdapter(TEN, {i: log_probabilities(p4=0.5) for i in range(64)})
    outcome = run(adapter, ConfidenceSampler(block_size=16, steps=8), 64)
    assert outcome.counts()["nfe"] == adapter.calls == 8
    assert 9 not in tokens(outcome)
    assert [len(step) for step in steps(outcome)] == [8] * 8


def test_threshold_commits_all_that_are_sure_and_always_the_surest() -> None:
    """Masks-rule vectors: at 0.9 with >= both 0.95 and 0.90 go; 0.89 and 0.2 go one by one, the surer first."""
    rows = [log_probabilities(p1=0.95), log_probabilities(p2=0.9 + 1e-6), log_probabilities(p3=0.89)]
    rows.append(log_probabilities(p4=0.3))
    sampler = ThresholdSampler(block_size=4, steps=4, threshold=0.9)
    outcome = run(TableAdapter(TEN, dict(enumerate(rows))), sampler, 4)
    assert steps(outcome) == [{0: 1, 1: 2}, {2: 3}, {3: 4}]


def test_equal_confidences_go_to_the_lowest_slot() -> None:
    table = {i: log_probabilities(p5=0.5) for i in range(4)}
    for sampler in (ThresholdSampler(block_size=4, steps=4), ConfidenceSampler(block_size=4, steps=4)):
        assert [list(step) for step in steps(run(TableAdapter(TEN, table), sampler, 4))] == [[0], [1], [2], [3]]


def test_threshold_with_a_step_budget_commits_what_the_rest_needs() -> None:
    table = {i: log_probabilities(p5=0.3 + 0.01 * i) for i in range(8)}
    outcome = run(TableAdapter(TEN, table), ThresholdSampler(block_size=8, steps=3, threshold=0.9), 8)
    assert [sorted(step) for step in steps(outcome)] == [[5, 6, 7], [2, 3, 4], [0, 1]]


def test_orders_pick_by_margin_entropy_and_position() -> None:
    """Slot 0 has the larger probability, slot 1 the larger margin and slot 2 the smaller entropy."""
    rows = [
        [math.log(p) for p in (0.50, 0.40, 0.10, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9)],
        [math.log(p) for p in (0.45, 0.11, 0.11, 0.11, 0.11, 0.11, 1e-9, 1e-9, 1e-9, 1e-9)],
        [math.log(p) for p in (0.49, 0.48, 0.03, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9)],
    ]
    first = {}
    for order in ("probability", "margin", "entropy", "left_to_right"):
        sampler = ConfidenceSampler(block_size=3, steps=3, order=order)
        first[order] = next(iter(steps(run(TableAdapter(TEN, dict(enumerate(rows))), sampler, 3))[0]))
    assert first == {"probability": 0, "margin": 1, "entropy": 2, "left_to_right": 0}


def test_random_order_repeats_with_its_stream_and_differs_between_streams() -> None:
    table = {i: log_probabilities(p5=0.5) for i in range(16)}
    sampler = ConfidenceSampler(block_size=16, steps=16, order="random")
    orders = [[next(iter(s)) for s in steps(run(TableAdapter(TEN, table), sampler, 16, stream=k))] for k in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != list(range(16))


def test_early_stop_leaves_blocks_behind_a_final_end_token() -> None:
    table = {i: log_probabilities(p8=0.99) if i == 1 else log_probabilities(p5=0.99) for i in range(8)}
    stopped = run(TableAdapter(TEN, table), ThresholdSampler(block_size=4, steps=8, early_stop=True), 8)
    whole = run(TableAdapter(TEN, table), ThresholdSampler(block_size=4, steps=8), 8)
    assert stopped.counts()["nfe"] == 1 and whole.counts()["nfe"] == 2
    assert tokens(stopped)[:4] == tokens(whole)[:4] == [5, 8, 5, 5]


def test_remasked_tokens_that_change_count_as_revised() -> None:
    """Slot 0 first holds 1, then, once slot 1 is known, 2."""

    def table(seen: Any, slot: int) -> list[float]:
        if slot == 1:
            return log_probabilities(p5=0.9)
        return log_probabilities(p2=0.95) if seen[1] == 5 else log_probabilities(p1=0.4)

    sampler = ConfidenceSampler(block_size=2, steps=2, remask_ratio=0.9)
    outcome = run(TableAdapter(TEN, table), sampler, 2)
    assert tokens(outcome) == [2, 5]
    assert outcome.state is not None and outcome.state.revised == 1


def test_autoregressive_stops_at_the_end_token_and_bills_the_prompt_as_prefill() -> None:
    facts = ModelFacts(10, None, frozenset({8}), shift=1, attention="causal", attentions=frozenset({"causal"}))
    table = {2: log_probabilities(p4=0.9), 3: log_probabilities(p6=0.9), 4: log_probabilities(p8=0.9)}
    outcome = run(
        TableAdapter(facts, lambda seen, slot: table.get(slot, [0.0] * 10)), AutoregressiveSampler(), 6, (1, 2)
    )
    assert tokens(outcome)[:5] == [1, 2, 4, 6, 8]
    counts = outcome.counts()
    assert (counts["nfe"], counts["nfe_prefill"], counts["nfe_denoise"], counts["token_forwards"]) == (3, 1, 2, 4)


def test_a_mask_id_in_the_prompt_is_text() -> None:
    outcome = run(ToyMaskedLMAdapter(), ConfidenceSampler(block_size=4, steps=4), 4, prompt=(0, 7, 0))
    assert tokens(outcome)[:3] == [0, 7, 0]


def test_host_and_device_draw_the_same_uniforms() -> None:
    keys = [stream_key(seed, sample) for seed in (0, 7) for sample in (0, 2**50)]
    counters = [(key, slot, draw) for key in keys for slot in (0, 999) for draw in (0, 31)]
    signed = [(key - (1 << 64) if key >> 63 else key, slot, draw) for key, slot, draw in counters]
    streams, slots, draws = (torch.tensor(column) for column in zip(*signed))
    assert uniforms(streams, slots, draws).tolist() == [uniform(*counter) for counter in counters]


def test_uniforms_are_uniform() -> None:
    from scipy.stats import kstest

    drawn = [uniform(stream_key(0, sample), slot, 3) for sample in range(200) for slot in range(50)]
    assert kstest(drawn, "uniform").pvalue > 1e-3
    assert min(drawn) > 0 and max(drawn) < 1


def test_sampled_tokens_follow_the_tempered_filtered_law() -> None:
    """10,000 draws at T = 0.7 with top-k 3 against the law worked out by hand; the untempered law must be refused."""
    from scipy.stats import chisquare

    probabilities = [0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0, 0, 0]
    row = [math.log(p) if p else -math.inf for p in probabilities]
    adapter = TableAdapter(TEN, dict.fromkeys(range(10000), row))
    sampler = ThresholdSampler(block_size=10_000, steps=10_000, threshold=0.0, temperature=0.7, top_k=3)
    drawn = tokens(run(adapter, sampler, 10_000, stream=stream_key(0, 0)))
    counts = [drawn.count(i) for i in range(3)]
    assert sum(counts) == 10_000

    def pvalue(temperature: float) -> float:
        weights = [p ** (1 / temperature) for p in probabilities[:3]]
        return chisquare(counts, [10_000 * w / sum(weights) for w in weights]).pvalue

    assert pvalue(0.7) > 1e-3
    assert pvalue(1.0) < 1e-6


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = [math.log(p) for p in (0.5, 0.3, 0.1, 0.06, 0.01, 0.01, 0.01, 0.005, 0.004, 0.001)]
    adapter = TableAdapter(TEN, dict.fromkeys(range(2000), row))
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.85, {0, 1, 2})):
        sampler = ThresholdSampler(block_size=2000, steps=2000, threshold=0.0, temperature=1.0, top_p=top_p)
        assert set(tokens(run(adapter, sampler, 2000))) == kept


def test_an_empty_canvas_is_decoded_without_a_forward() -> None:
    """A sampler that yields nothing is done, with no forwards billed."""
    outcome = next(
        iter(Engine(ToyMaskedLMAdapter(), ConfidenceSampler(block_size=1, steps=1)).decode([Task(0, [5], 0)], 1))
    )
    assert outcome.log == []


SAMPLERS_TO_CHECK: list[BlockDiffusionSampler] = [
    ConfidenceSampler(block_size=8, steps=24),
    ConfidenceSampler(block_size=8, steps=12, remask_ratio=0.4),
    ConfidenceSampler(block_size=8, steps=6, temperature=0.8, order="entropy"),
    ThresholdSampler(block_size=8, steps=24, threshold=0.3),
    ThresholdSampler(block_size=4, steps=24, threshold=0.3, temperature=0.8, order="margin"),
]


@pytest.mark.parametrize("sampler", SAMPLERS_TO_CHECK, ids=lambda s: f"{s.method_name}-{s.temperature}-{s.steps}")
def test_every_sampler_leaves_no_mask_seals_blocks_in_order_and_never_touches_the_prompt(
    sampler: BlockDiffusionSampler,
) -> None:
    def table(seen: Any, slot: int) -> list[float]:
        mixed = (slot * 7919 + sum(seen.values()) * 104_729) % 8
        return [2.5 if i == mixed else 0.1 * ((slot + i) % 3) for i in range(10)]

    prompt = (3, 9, 4)
    adapter = TableAdapter(TEN, table)
    outcome = run(adapter, sampler, 24, prompt, stream=11)
    assert outcome.counts()["nfe"] == adapter.calls
    assert tuple(tokens(outcome)[:3]) == prompt and 9 not in tokens(outcome)[3:]
    first_touch: dict[int, int] = {}
    for forward, changed in enumerate(steps(outcome)):
        for slot in changed:
            first_touch.setdefault((slot - 3) // sampler.block_size, forward)
            later = [block for block in first_touch if block > (slot - 3) // sampler.block_size]
            assert not later, "a block was touched after a later one had begun"


def test_state_revises_and_remembers() -> None:
    state = DecodeState.masked([1], 2, TEN)
    state.commit(1, 4)
    state.commit(1, 4)
    assert state.revised == 0
    state.commit(1, 5)
    state.remask(1)
    assert state.mask[1] and state.tokens[1] == 9
    state.commit(1, 6)
    assert state.revised == 2 and state.masked_in(state.canvas) == [2]


def test_ids_that_no_answer_can_hold_are_not_committed() -> None:
    state = DecodeState.masked([1], 2, TEN)
    for token in (9, 10, -1):
        with pytest.raises(ValueError, match=f"committed {token} to slot 1"):
            state.commit(1, token)


def test_a_sampler_that_leaves_a_slot_open_has_failed() -> None:
    class Lazy(ThresholdSampler):
        method_name = "lazy"

        def update_state(self, state: DecodeState, prediction: Any, step: int) -> None:
            state.commit(prediction.positions[0], prediction.token[prediction.positions[0]])

        def steps_per_block(self, state: DecodeState) -> int:
            return 1

    engine = Engine(ToyMaskedLMAdapter(), Lazy(block_size=4, steps=4))
    (outcome,) = engine.decode([Task(0, [5], 4)], 5)
    assert (outcome.failure, outcome.error) == ("failed", "the sampler ended and left slot 2 undecided")
