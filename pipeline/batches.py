"""What a training step sees: fresh problems, what is hidden of them, and what is to be learnt where.

Shapes: B rows, T tokens of a sequence.
"""

from __future__ import annotations

import random

import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from pipeline.data.arithmetic import LEVELS, Problem, make_problem
from pipeline.recipe import FAMILIES, STEPS_AN_EPOCH, Recipe

SHORTEST_CANVAS, LONGEST_CANVAS = 26, 38  # the longest answer (four operations) takes 25 tokens and its end token
IGNORE = -100  # cross-entropy skips targets of this value


class Batches(Dataset):
    """Fresh problems for every step. Item ``i`` depends only on (seed, epoch, i), so resuming changes nothing.

    An item is (inputs, targets), both (B, T): the chat prompt, the answer, and end tokens up to a common length;
    targets are ``IGNORE`` wherever nothing is to be learnt. For attention by blocks both are (B, 2 T), the noisy
    sequence and then the clean one, T being whole blocks.
    """

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int, epoch: int) -> None:
        self.recipe, self.tokenizer, self.seed, self.epoch = recipe, tokenizer, seed, epoch

    def __len__(self) -> int:
        return STEPS_AN_EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"{self.seed}-{self.epoch}-{index}")
        ids, answered, ended = sequences(self.recipe, self.tokenizer, rng)
        if self.recipe.objective == "causal":
            return self._causal(ids, answered & ~ended)
        return self._masked(ids, answered, torch.Generator().manual_seed(rng.getrandbits(63)))

    def _causal(self, ids: torch.Tensor, learnt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row predicts the next token of the answer, its first end token included."""
        return ids[:, :-1], ids.masked_fill(~learnt, IGNORE)[:, 1:]

    def _masked(
        self, ids: torch.Tensor, answered: torch.Tensor, noise: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each answer token (filler end tokens too, as LLaDA does) is masked with probability t ~ U(0, 1), which its
        row has in common, or its block."""
        size = self.recipe.block_size or ids.shape[1]
        t = torch.rand(ids.shape[0], ids.shape[1] // size, generator=noise).repeat_interleave(size, 1)
        masked = answered & (torch.rand(ids.shape, generator=noise) < t)
        inputs, targets = ids.masked_fill(masked, self.tokenizer.mask_token_id), ids.masked_fill(~masked, IGNORE)
        if FAMILIES[self.recipe.family].shift:
            targets = pad(targets[:, 1:], (0, 1), value=IGNORE)
        if self.recipe.block_size is None:
            return inputs, targets
        return torch.cat((inputs, ids), 1), pad(targets, (0, ids.shape[1]), value=IGNORE)


def sequences(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chats of fresh problems, (B, T): their ids, where the answers are, and where these have ended.

    Answers end with end tokens up to a common length; the first of them has not ended yet.
    """
    problems = [_problem(recipe, rng) for _ in range(recipe.batch_size)]
    chats = [[{"role": "user", "content": p.question}] for p in problems]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    answers = tokenizer([p.answer for p in problems]).input_ids
    canvas = rng.randint(SHORTEST_CANVAS, LONGEST_CANVAS)
    size = recipe.block_size or 1
    length = -(-(max(map(len, prompts)) + canvas) // size) * size
    ids = torch.full((len(problems), length), tokenizer.eos_token_id)
    answered = torch.zeros_like(ids, dtype=torch.bool)
    ended = torch.zeros_like(answered)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        answered[row, len(prompt) :] = True
        ended[row, end + 1 :] = True
    return ids, answered, ended


def _problem(recipe: Recipe, rng: random.Random) -> Problem:
    while True:
        problem = make_problem(rng.choices(LEVELS, recipe.level_weights)[0], rng)
        if problem.split == "train":
            return problem
