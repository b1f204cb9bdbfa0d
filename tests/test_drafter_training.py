"""Training a drafter: what a block sees and learns, resuming, and that what is served is what was trained."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters.base import DeviceAdapter, Request
from adapters.description import describe
from adapters.dflash import DFlashDrafter, load_drafter
from adapters.loading import load
from adapters.places import ModelOptions
from adapters.transformer import TransformerAdapter
from pipeline import drafting
from pipeline.data.arithmetic import make_problems
from pipeline.draft_target import tapped_layers
from pipeline.drafting import DraftBatches, Drafting, slot_weights
from pipeline.errors import UserError
from pipeline.objective import Batch
from pipeline.recipe import Recipe
from pipeline.stopping import Stopped
from pipeline.training import Training
from samplers import Forward
from tests.commands import Here
from tests.conftest import ROOT
from tests.shared import shared

SHORT = ["recipe=dflash", "recipe.steps=100", "recipe.batch_size=2", "recipe.anchors=3", "recipe.layers=1"]
SHORT += ["recipe.intermediate_size=32", "recipe.warmup=10"]


def _recipe(**changes: object) -> Recipe:
    values = json.loads((ROOT / "adapters/tiny/ar_dflash/training.json").read_text())["config"]["recipe"]
    return Recipe(**{**values, "batch_size": 6, "anchors": 5, "intermediate_size": 64, **changes})


@pytest.fixture(scope="module")
def trained() -> Drafting:
    """At its first step."""
    torch.manual_seed(0)
    return Drafting(_recipe())


@pytest.fixture(scope="module")
def batch(trained: Drafting) -> Batch:
    return trained.batches(seed=0, epoch=0)[0]


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


# ---- what a step holds -----------------------------------------------------------------------------------------------


def test_anchors_are_tokens_of_the_answer_that_a_token_follows_and_none_is_drawn_twice(trained: Drafting) -> None:
    ids, learnt, anchors, drawn = DraftBatches(_recipe(anchors=1000), trained.tokenizer, seed=0, epoch=0)[0]
    for row, tokens in enumerate(ids.tolist()):
        first = tokens.index(trained.tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1
        end = tokens.index(trained.tokenizer.eos_token_id)
        assert learnt[row].nonzero().flatten().tolist() == list(range(first, end + 1))
        assert sorted(anchors[row][drawn[row]].tolist()) == list(range(first, end))


def test_a_step_depends_on_seed_epoch_and_index_alone_and_anchors_are_drawn_anew(trained: Drafting) -> None:
    first, again, other = (trained.batches(seed=0, epoch=epoch)[7] for epoch in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again)) and not torch.equal(first[2], other[2])
    answer = first[1].int().argmax(1)
    assert len({tuple(sorted(row)) for row in (first[2] - answer[:, None]).tolist()}) == 6


def test_slot_k_learns_the_token_at_the_anchor_plus_k(trained: Drafting, batch: Batch) -> None:
    ids, learnt, anchors, drawn = batch
    labels, weights = trained.labels(ids, learnt, anchors, drawn)
    seen = 0
    for row, block, k in weights.nonzero().tolist():
        slot = int(anchors[row, block]) + k
        assert k >= 1 and learnt[row, slot] and drawn[row, block] and labels[row, block, k] == ids[row, slot]
        assert weights[row, block, k].item() == pytest.approx(math.exp(-(k - 1) / 7))
        seen += 1
    followers = learnt[:, None] & (torch.arange(ids.shape[1]) > anchors[..., None])
    followers &= torch.arange(ids.shape[1]) < anchors[..., None] + 16
    assert seen == (followers & drawn[..., None]).sum()


def test_what_the_target_would_not_say_and_all_behind_it_is_not_learnt(trained: Drafting, batch: Batch) -> None:
    ids, learnt, anchors, drawn = batch
    assert torch.equal(trained.clean_pass(ids, learnt)[1], learnt), "the shipped target says the answers itself"
    wrong, place = ids.clone(), int(learnt[0].nonzero()[4])
    wrong[0, place] = trained.tokenizer.convert_tokens_to_ids("Tom")  # type: ignore[assignment]
    own = trained.clean_pass(wrong, learnt)[1]
    assert own[0].nonzero().flatten().tolist() == learnt[0].nonzero().flatten().tolist()[:4]
    assert torch.equal(own[1:], learnt[1:])
    _, weights = trained.labels(wrong, own, anchors, drawn)
    slots = anchors[0, :, None] + torch.arange(16)
    assert (weights[0][slots >= place] == 0).all()


def test_the_weights_of_slots_are_the_published_ones() -> None:
    assert slot_weights(4, 4.0).tolist() == pytest.approx([0, 1, math.exp(-1 / 4), math.exp(-2 / 4)])
    assert drafting.GAMMAS == {8: 4, 10: 5, 16: 7}


def test_the_loss_is_the_weighted_mean_over_all_slots_of_the_step(trained: Drafting, batch: Batch) -> None:
    ids, learnt, anchors, drawn = batch
    with torch.no_grad():
        caught, own = trained.clean_pass(ids, learnt)
        labels, weights = trained.labels(ids, own, anchors, drawn)
        logits = trained.target.lm_head(trained.hidden(ids, caught, anchors))
        losses = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        loss = trained.loss(batch)
    assert loss is not None and loss.item() == pytest.approx(float((weights * losses).sum() / weights.sum()), rel=1e-5)
    assert trained.loss((ids, learnt, anchors, torch.zeros_like(drawn))) is None


# ---- what a block sees -----------------------------------------------------------------------------------------------


def _states(trained: Drafting, batch: Batch) -> Tensor:
    ids, learnt, anchors, _ = batch
    with torch.no_grad():
        return trained.hidden(ids, trained.clean_pass(ids, learnt)[0], anchors)


def _leaks(trained: Drafting, batch: Batch) -> bool:
    """Whether a block's states depend on the features at its anchor or behind it."""
    ids, learnt, anchors, _ = batch
    caught, _ = trained.clean_pass(ids, learnt)
    for block in range(anchors.shape[1]):
        behind = torch.arange(ids.shape[1]) >= anchors[:, block, None]
        changed = torch.where(behind[..., None], torch.randn_like(caught), caught)
        with torch.no_grad():
            before, after = (trained.hidden(ids, features, anchors)[:, block] for features in (caught, changed))
        if not torch.allclose(before, after, atol=1e-5):
            return True
    return False


def test_a_block_sees_the_context_strictly_before_its_anchor(
    trained: Drafting, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _leaks(trained, batch)
    right = drafting.blocks_see
    monkeypatch.setattr(drafting, "blocks_see", lambda anchors, *sizes: right(anchors + 1, *sizes))  # <= instead of <
    assert _leaks(trained, batch), "the test could not see the leak"


def test_a_block_sees_every_slot_of_the_context_before_its_anchor(trained: Drafting, batch: Batch) -> None:
    ids, learnt, anchors, _ = batch
    caught, _ = trained.clean_pass(ids, learnt)
    caught.requires_grad_()
    trained.hidden(ids, caught, anchors)[0, 0].pow(2).sum().backward()
    assert caught.grad is not None
    seen = caught.grad[0].abs().sum(-1) > 0
    assert seen.nonzero().flatten().tolist() == list(range(int(anchors[0, 0])))


def test_tokens_behind_an_anchor_and_other_blocks_change_nothing(trained: Drafting, batch: Batch) -> None:
    ids, learnt, anchors, drawn = batch
    before = _states(trained, batch)
    one = anchors[:, :1]
    changed = ids.where(torch.arange(ids.shape[1]) <= one, 20)
    elsewhere = torch.cat((one, anchors[:, 1:].roll(1, 0)), 1)
    after = _states(trained, (changed, learnt, elsewhere, drawn))
    assert torch.allclose(before[:, 0], after[:, 0], atol=1e-5)
    assert not torch.allclose(before[:, 1:], after[:, 1:], atol=1e-2)
    assert torch.allclose(before[:, :1], _states(trained, (ids, learnt, one, drawn[:, :1])), atol=1e-5)


def test_the_slots_of_a_block_see_one_another(trained: Drafting, batch: Batch) -> None:
    ids, learnt, anchors, drawn = batch
    before, other = _states(trained, batch), ids.clone()
    other.scatter_(1, anchors[:, :1], 20)  # the anchor's token: block 0's only input that is no mask
    one = (other, learnt, anchors[:, :1], drawn[:, :1])
    assert ((_states(trained, one)[:, 0] - before[:, 0]).abs().amax(-1) > 1e-3).all()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_same_command_after_an_interruption_gives_the_weights_of_one_go(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, stop = Training.training_step, [True]

    def stopped(self: Training, batch: Batch, batch_idx: int) -> None:
        if stop[0] and (self.current_epoch, batch_idx) == (1, 30):
            raise Stopped(signal.SIGINT)  # a signal itself ends the process: it would be heeded only once
        step(self, batch, batch_idx)

    monkeypatch.setattr(Training, "training_step", stopped)
    out, err = here(*SHORT, "run=cut", module="pipeline.train", code=130)
    assert err == "interrupted (SIGINT): the same command continues\n" and "100 steps of 2 problems" in out
    stop[0] = False
    out, err = here(*SHORT, "run=cut", module="pipeline.train")
    assert err == "" and "from step 50 on" in out
    said = "model=tiny_ar_dflash sampler=dflash model.path=tiny/ar model.draft=outputs/train/cut/model"
    assert f"decode with: python -m pipeline {said} dataset.limit=20" in out
    here(*SHORT, "run=whole", module="pipeline.train")
    cut, whole = (here.folder / "outputs" / "train" / run for run in ("cut", "whole"))
    for name in ("loss.jsonl", "model/model.safetensors", "model/config.json", "settings.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    losses = [json.loads(line)["loss"] for line in (cut / "loss.jsonl").read_text().splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0]
    _, err = here(*SHORT, "run=cut", "recipe.gamma=5", module="pipeline.train", code=2)
    assert "was trained with recipe.gamma=None instead of 5.0: repeat these settings" in err
    _holds_the_published_layout(cut / "model")


def _holds_the_published_layout(folder: Path) -> None:
    golden = shared("golden", "dflash", "draft")
    published, written = (json.loads((where / "config.json").read_text()) for where in (golden, folder))
    assert written.keys() == published.keys() - {"transformers_version"}
    assert written["dflash_config"] == {"mask_token_id": 1, "target_layer_ids": [1, 2, 3]}
    assert written["block_size"] == 16 and written["num_target_layers"] == 4
    names = {name for name in load_file(golden / "model.safetensors") if not name.startswith("layers.1.")}
    assert set(load_file(folder / "model.safetensors")) == names
    assert isinstance(load_drafter(folder, _target()), DFlashDrafter)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("recipe.target=null", "recipe.target=null does not fit: use a model folder, or tiny/ar"),
        ("recipe.target=nowhere", "recipe.target=nowhere is no model to draft for: use a folder with config.json"),
        ("recipe.target=tiny/llada", "is not autoregressive (its attention is full): use one that is, such as tiny/ar"),
        ("recipe.hidden_size=64", "whose embedding and head the drafter borrows: use 128"),
        ("recipe.taps=null", "recipe.taps=null, by the published rule [1, 1], does not fit recipe.target=tiny/ar: use"),
        (
            "recipe.taps=[1,4]",
            "recipe.taps=[1, 4] does not fit recipe.target=tiny/ar: use ascending layers from 0",
        ),
        ("recipe.taps=[2,1]", "use ascending layers from 0 to 3"),
        ("recipe.taps=[]", "use ascending layers from 0 to 3"),
        ("recipe.anchors=0", "recipe.anchors=0 does not fit: use a whole number from 1 up"),
        ("recipe.anchors=null", "recipe.anchors=null does not fit"),
        ("recipe.gamma=0", "recipe.gamma=0.0 does not fit: use a finite number above 0"),
        ("recipe.gamma=nan", "recipe.gamma=nan does not fit"),
        ("recipe.block_size=12", "recipe.gamma=null does not fit: use a finite number above 0 (published for"),
        ("recipe.block_size=1", "recipe.block_size=1 does not fit recipe.family=dflash: use a whole number from 2 up"),
        ("recipe.block_size=null", "recipe.block_size=null does not fit recipe.family=dflash"),
        ("recipe.start=tiny/ar", "recipe.start=tiny/ar is not used by recipe.objective=dflash: leave it null"),
        ("recipe.family=sdar", "recipe.family=sdar is trained with recipe.objective=masked: dflash needs dflash"),
        ("recipe.objective=causal", "recipe.family=dflash is trained with recipe.objective=dflash: causal needs llama"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line_before_anything_is_made(
    here: Here, given: str, said: str
) -> None:
    out, err = here("recipe=dflash", given, module="pipeline.train", code=2)
    assert out == "" and err.startswith("error: recipe.") and err.count("\n") == 1 and said in err
    assert not list(here.folder.iterdir())


def test_targets_that_say_other_answers_or_speak_another_vocabulary_are_refused(here: Here) -> None:
    model = _target().model
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    model.save_pretrained(here.folder / "dumb")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (here.folder / "dumb" / name).write_bytes((ROOT / "adapters/tiny/ar" / name).read_bytes())
    _, err = here("recipe=dflash", "recipe.target=dumb", module="pipeline.train", code=2)
    assert err.count("\n") == 1 and "says 0% of the problems' answers itself: use a model that was trained" in err
    tokenizer = here.folder / "dumb" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"Tom"', '"Tim"'))
    _, err = here("recipe=dflash", "recipe.target=dumb", module="pipeline.train", code=2)
    assert err.count("\n") == 1 and "has another vocabulary than the problems: use that of tiny/ar" in err
    assert [path.name for path in here.folder.iterdir()] == ["dumb"]


def test_taps_that_are_not_named_are_spread_as_published() -> None:
    assert tapped_layers(_recipe(taps=None, layers=5), depth=36) == [1, 9, 17, 25, 33]
    with pytest.raises(UserError, match="by the published rule"):
        tapped_layers(_recipe(taps=None), depth=4)


# ---- the drafter that ships ------------------------------------------------------------------------------------------

SHIPPED = ROOT / "adapters" / "tiny" / "ar_dflash"


def _target() -> TransformerAdapter:
    adapter = load(describe(ModelOptions(path="tiny/ar")), torch.device("cpu"))
    assert isinstance(adapter, TransformerAdapter)
    return adapter


def _drafts(drafter: DeviceAdapter, start: int) -> list[int]:
    window = range(start, start + 16)
    (said,) = drafter.forward([Request(0, Forward(window, window[1:], context=range(start)), [], [])])
    return list(said.token.values())


def test_the_drafter_served_is_the_one_trained_and_its_drafts_are_mostly_the_targets_words() -> None:
    """Held-out problems. A drafter that saw its anchor's features in training would be no good here."""
    trained = Drafting(_recipe(intermediate_size=512))
    trained.model.load_state_dict(load_file(SHIPPED / "model.safetensors"))
    served, tokenizer = load_drafter(SHIPPED, _target()), trained.tokenizer
    matched = []
    for problem in make_problems("test", 4, 5):
        chat = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([[*prompt, *tokenizer(problem.answer).input_ids, tokenizer.eos_token_id]])
        caught, _ = trained.clean_pass(ids, torch.ones_like(ids, dtype=torch.bool))
        for start in range(len(prompt), ids.shape[1] - 16, 3):
            with torch.no_grad():
                logits = trained.target.lm_head(trained.hidden(ids, caught, torch.tensor([[start]])))[0, 0, 1:]
            logits[:, 1] = -torch.inf  # a mask is never drafted
            served.open(1, ids.shape[1] + 16)
            served.place(0, [*ids[0, : start + 1].tolist(), *[1] * 15], 0)
            served.remember({0: range(start)}, caught[:, :start])
            drafts = _drafts(served, start)
            assert drafts == logits.argmax(-1).tolist()
            right = [a == b for a, b in zip(drafts, ids[0, start + 1 :].tolist())]
            matched.append((*right, False).index(False))
    assert sum(matched) / len(matched) > 8, "of 15 drafts, from any anchor"
