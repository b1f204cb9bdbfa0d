"""The tiny models' tokenizer: whole numbers and whole words are tokens, everything else falls back to bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LARGEST_NUMBER = 119
END, MASK, USER, ASSISTANT = "<|end|>", "<|mask|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SIGNS = ("+", "-", "*", "/", "=", "####")
# a run of digits, of letters, or of marks, each with the space before it; white space that is left over stays by itself
PIECES = r" ?\d+| ?\p{L}+| ?[^\s\d\p{L}]+|\s+"


def build_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges whose vocabulary holds ``words``, the numbers below 120 and a few signs.

    A piece that is in the vocabulary is one token; any other piece is spelled in bytes, so every text can be encoded
    and decodes to itself.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [END, MASK, USER, ASSISTANT]
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = [f"Ġ{n}" for n in range(LARGEST_NUMBER + 1)] + [f"Ġ{sign}" for sign in SIGNS]
    whole += [form for word in words for form in (word, f"Ġ{word}")]
    vocabulary = {token: i for i, token in enumerate([*special, *byte_level, *whole])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    byte_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, mask_token=MASK)
    fast.chat_template = CHAT_TEMPLATE
    return fast
