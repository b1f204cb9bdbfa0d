"""An autoregressive model that verifies in one forward what a drafter proposed in one."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from samplers.base import Decoding, Sampler, refuse_unless
from samplers.drafts import at_random, commit, continued, walk
from samplers.forward import CAUSAL, Attend, Forward, Kind, Law, Prediction, Role
from samplers.state import DecodeState, ModelFacts
from samplers.trees import Candidates, Node, chain, ddtree, presto

TREES = ("chain", "ddtree", "presto")
DRAFTERS = ("model", "ngram", "random")
COMPAT = (None, "dflash_v0")
MOST_DRAFTS = 4096  # of a round, each of which takes a slot of every row; published trees have 1024 at most
MOST_CANDIDATES = 64  # a depth's ids beyond these hardly ever make a node
PREFIX_WEIGHT = 0.2
NGRAM_ORDER = 3
EMITTED = "dflash_v0_emitted"  # a note: tokens that the authors' first version counts, those behind the canvas too

Drafting = Generator[Forward, Prediction, Candidates]


@dataclass(frozen=True, kw_only=True)
class DFlashSampler(Sampler):
    """Draft some tokens behind the last one known, verify them in one forward, keep what the model says itself.

    DFlash (arXiv 2602.06036). The drafter is shown the last token and masks and predicts all of them at once, from the
    target's own features of what precedes; the target runs them as a window and predicts, behind each, the next. It
    commits its own tokens as long as they are what was drafted, and one more. So its output is that of plain decoding,
    whatever is drafted; above temperature 0 it has the same law, with other random numbers. A round makes one forward
    of the drafter and one of the target, and commits 1 token to `draft_width` + 1. The canvas' last slot is never
    drafted, as the target decides it anyway; where only that is left the round is plain decoding.

    With a tree, several drafts of a slot are verified together, each seeing only what leads to it: the prefixes of the
    largest score that a budget allows (`samplers.trees`).

    Attributes:
        draft_width: tokens drafted a round, the last known one not counted, 4096 at most; null is what the drafter was
            trained for, its block less 1. 0 is `autoregressive`, call for call.
        tree: ``chain``, ``ddtree`` (by the drafter's probabilities) or ``presto`` (and by an n-gram model's).
        node_budget: drafts of a tree, 4096 at most; null is `draft_width`, DDTree's own default.
        draft_candidates: ids of a depth that may enter a tree, 4096 at most; null is the budget, at most 64.
        prefix_weight: PRESTO's lambda, the n-gram model's share in a score; null is 0.2.
        ngram_order: tokens that an n-gram model counts in a row (``presto``, or ``drafter: ngram``: 3 if null).
        sampled_drafts: above temperature 0 drafts are drawn from the drafter's law, tempered and cut as the target's,
            and kept by speculative sampling (Leviathan et al. 2023), as in the authors' second version. Otherwise they
            are its likeliest tokens, kept where the target draws the same: exact, too, and more of them are kept where
            the drafter predicts each slot by itself.
        drafter: ``model``, the one that the target comes with; ``ngram``, an n-gram model's likeliest continuation; or
            ``random`` ids. The last two need no drafter: they show that no draft changes what is decoded.
        compat: ``dflash_v0``, the authors' first version: the last blocks are run whole, behind the canvas, with a
            round once it is full, and one although the first token is an end token.
    """

    method_name: ClassVar[str] = "dflash"
    attentions: ClassVar[frozenset[str]] = frozenset({"causal"})

    draft_width: int | None = None
    tree: str = "chain"
    node_budget: int | None = None
    draft_candidates: int | None = None
    prefix_weight: float | None = None
    ngram_order: int | None = None
    sampled_drafts: bool = False
    drafter: str = "model"
    compat: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        width, weight, budget, many = self.draft_width, self.prefix_weight, self.node_budget, self.draft_candidates
        refuse_unless(width is None or 0 <= width <= MOST_DRAFTS, "draft_width", width, f"null, or 0 to {MOST_DRAFTS}")
        refuse_unless(self.tree in TREES, "tree", self.tree, f"one of {', '.join(TREES)}")
        for name, most in (("node_budget", budget), ("draft_candidates", many)):
            refuse_unless(most is None or 1 <= most <= MOST_DRAFTS, name, most, f"null, or 1 to {MOST_DRAFTS}")
        refuse_unless(weight is None or 0 <= weight < math.inf, "prefix_weight", weight, "null, or 0 or more")
        order = self.ngram_order
        refuse_unless(order is None or order >= 1, "ngram_order", order, "a whole number from 1 up")
        refuse_unless(self.drafter in DRAFTERS, "drafter", self.drafter, f"one of {', '.join(DRAFTERS)}")
        refuse_unless(self.compat in COMPAT, "compat", self.compat, "null or dflash_v0")
        refuse_unless(self.eos != "last", "eos", self.eos, "allow or never: in order, no end token can wait")
        self.refuse_idle()
        if order is None and self.draft_width != 0 and (self.tree == "presto" or self.drafter == "ngram"):
            object.__setattr__(self, "ngram_order", NGRAM_ORDER)  # null stays where nothing is counted

    @classmethod
    def idle(cls, given: Mapping[str, object]) -> Mapping[str, str]:
        if given.get("draft_width") == 0:  # plain decoding, whatever preset it was asked of
            return {}
        tree, drafter = given.get("tree", cls.tree), given.get("drafter", cls.drafter)
        chain, model, drawn = tree == "chain", drafter == "model", bool(given.get("sampled_drafts"))
        tempered = bool(given.get("temperature", cls.temperature))
        meant = {
            "node_budget": (not chain, "tree=ddtree and presto"),
            "draft_candidates": (not chain, "tree=ddtree and presto"),
            "prefix_weight": (tree == "presto", "tree=presto"),
            "ngram_order": (tree == "presto" or drafter == "ngram", "tree=presto and drafter=ngram"),
            "compat": (chain and not drawn, "tree=chain without sampled_drafts"),
            "sampled_drafts": (
                chain and model and tempered,
                "tree=chain with drafter=model and a temperature above 0",
            ),
        }
        set_ = [name for name in meant if given.get(name) is not None and given.get(name) is not False]
        return {name: meant[name][1] for name in set_ if not meant[name][0]}

    @classmethod
    def check(cls, model: ModelFacts) -> None:
        super().check(model)
        if model.shift != 1:
            raise ValueError(
                f"sampler={cls.method_name} verifies a token where the one before it is run, but this model predicts "
                "it where it stands: use an autoregressive model"
            )

    @classmethod
    def suited(cls, model: ModelFacts) -> Mapping[str, object]:
        """What the drafter was trained for."""
        trained = model.draft.trained_block if model.draft else None
        return {**super().suited(model), **({"draft_width": trained - 1} if trained else {})}

    def refuse_misfit(self, model: ModelFacts) -> None:
        """Refuse a model without the drafter asked for, or whose drafter was made for less.

        Raises:
            ValueError: naming the setting and what would be right.
        """
        drafter = model.draft
        if self.draft_width == 0:
            return
        if self.drafter != "model":
            self.width(model)
            return
        if drafter is None:
            raise ValueError(
                "sampler.drafter=model needs a model that comes with a drafter, this one has none: use one that has, "
                "such as model=tiny_ar_dflash, name its drafter as model.draft=…, or use sampler.drafter=ngram"
            )
        trained = drafter.trained_block
        if drafter.attention != "full" or trained is None:
            raise ValueError(
                "sampler.drafter=model drafts a block from the target's features (DFlash), but this model's drafter is "
                "a diffusion model of its own: use sampler=failfast, or sampler.drafter=ngram"
            )
        if self.width(model) >= trained:
            raise ValueError(
                f"sampler.draft_width={self.draft_width} is more than the drafter was trained for: blocks of {trained} "
                f"with the last known token, so use at most {trained - 1}"
            )

    def width(self, model: ModelFacts) -> int:
        """Tokens drafted a round.

        Raises:
            ValueError: if neither `draft_width` nor a drafter says.
        """
        if self.draft_width is not None:
            return self.draft_width
        if model.draft is None or model.draft.trained_block is None:
            raise ValueError(
                "sampler.draft_width=null is what the model's drafter was trained for, which is not known here: give "
                "a number, 0 for plain decoding"
            )
        return model.draft.trained_block - 1

    def budget(self, model: ModelFacts) -> int:
        """Most drafts of a tree: what is asked for, or all that its depths can hold."""
        width = self.width(model)
        asked, held, level = self.node_budget or width, 0, 1
        for _ in range(width):
            level *= self._candidates_of(model)
            held += level
            if held >= asked:
                return asked
        return held

    def _candidates_of(self, model: ModelFacts) -> int:
        """Ids of a depth that are looked at."""
        if self.tree == "chain":
            return 1
        asked = self.draft_candidates or min(self.node_budget or self.width(model), MOST_CANDIDATES)
        return min(asked, model.vocab_size)

    @property
    def lossless(self) -> bool:
        return True

    @property
    def reads_ngrams(self) -> bool:
        """Whether `DecodeState.ngram` must be there."""
        return self.drafter == "ngram" or (self.tree == "presto" and self._weight > 0)

    @property
    def _weight(self) -> float:
        return PREFIX_WEIGHT if self.prefix_weight is None else self.prefix_weight

    def spare_slots(self, model: ModelFacts) -> int:
        return self.width(model) if self.compat else self.budget(model) if self.tree != "chain" else 0

    def decode(self, state: DecodeState) -> Decoding:
        if not state.canvas:
            return
        law, prompt, start = self.law(state), range(state.prompt_length), state.prompt_length
        said = yield Forward(prompt, [start], store=prompt, attend=CAUSAL, law=law, draw=state.forwards)
        ended = commit(state, start, [(said.token[start], said.confidence[start])])
        if ended and not self.compat:
            return
        keep = None  # of the last window, the slots that were right, the one before the first draft included
        last = len(state.tokens) - (0 if self.compat else 1)
        while start < last:
            nodes = yield from self._drafts(state, start, keep)
            said = yield self._verification(state, start, nodes, keep, law)
            path, emitted = walk(start, nodes, said)
            if self.compat:
                state.notes[EMITTED] += len(emitted)
            if commit(state, start + 1, emitted):
                return
            keep = [start + place for place in path] if nodes else None
            start += len(path)

    def _drafts(
        self, state: DecodeState, start: int, keep: Sequence[int] | None
    ) -> Generator[Forward, Prediction, list[Node]]:
        """What to verify behind slot ``start``, in the order of the window."""
        width = self.width(state.model)
        # the target adds a token of its own: the last slot needs no draft
        depth = width if self.compat else min(width, len(state.tokens) - start - 2)
        if not depth:
            return []
        window, budget = range(start, start + depth + 1), self.budget(state.model)
        candidates = yield from self._candidates(state, window, keep, self._candidates_of(state.model))
        if self.tree == "chain":
            return chain(candidates)
        if self.tree == "ddtree" or not self.reads_ngrams:
            return ddtree(candidates, budget)
        ngram = state.ngram
        assert ngram is not None, "sampler.tree=presto needs an n-gram model"
        context = state.tokens[max(0, start + 2 - ngram.order) : start + 1]
        return presto(candidates, budget, self._weight, ngram.log_probability, context)

    def _candidates(self, state: DecodeState, window: range, keep: Sequence[int] | None, wanted: int) -> Drafting:
        """By depth, likeliest first, ``wanted`` ids for a slot of the window behind its first."""
        if self.drafter == "random":
            return at_random(state, window, wanted)
        if self.drafter == "ngram":
            return continued(state, window, wanted)
        said = yield self._draft_forward(state, window, keep, wanted)
        if self.tree == "chain":
            return [[(said.token[slot], 0.0)] for slot in window[1:]]  # nothing is ranked by them
        return [said.best[slot] for slot in window[1:]]

    def _draft_forward(self, state: DecodeState, window: range, keep: Sequence[int] | None, wanted: int) -> Forward:
        """The window shown as its first token and masks; ``keep`` is what the drafter has not heard of yet."""
        assert state.model.draft is not None and state.model.draft.mask_id is not None
        law = self.law(state)
        return Forward(
            window,
            want=window[1:],
            context=range(window.start),
            keep=keep,
            variants=[dict.fromkeys(window[1:], state.model.draft.mask_id)],
            law=law if self.sampled_drafts else Law(banned=law.banned),
            draw=state.forwards,
            best=0 if self.tree == "chain" else wanted,
            carry=self.sampled_drafts,
            kind=Kind.DRAFT,
            role=Role.DRAFT,
        )

    def _verification(
        self, state: DecodeState, start: int, nodes: Sequence[Node], keep: Sequence[int] | None, law: Law
    ) -> Forward:
        """The last known token with the drafts behind it; what each is followed by is read at its own row."""
        window, depths = range(start, start + len(nodes) + 1), [0, *(node.depth for node in nodes)]
        forward = Forward(
            window,
            want=list(range(start + 1, window.stop + 1)),
            context=range(start),
            store=window,
            keep=keep,
            attend=CAUSAL,
            law=law,
            draw=state.forwards,
        )
        if not nodes:
            return forward
        drafts = {start + place: node.token for place, node in enumerate(nodes, 1)}
        forward = replace(forward, variants=[drafts], proposed=window[1:], kind=Kind.VERIFY)
        if self.sampled_drafts:
            drawn = {slot: (drafts[slot],) for slot in window[1:]}
            return replace(forward, judged_drafts=True, rivals=drawn)
        if self.tree == "chain":
            return forward
        attend = Attend("tree", parents=(0, *(node.parent for node in nodes)))
        return replace(forward, attend=attend, positions=[start + depth for depth in depths])
