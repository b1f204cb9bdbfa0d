"""Text to ids and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": …}


class TextCodec(Protocol):
    """What the pipeline needs of a tokenizer."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, up to where the answer starts."""

    def decode(self, ids: Sequence[int], raw: bool = False) -> str:
        """Text of ids; ``raw`` keeps special tokens visible."""


class IdCodec:
    """For models without a tokenizer: bytes of the text as ids, ids as numbers in print."""

    def __init__(self, vocab_size: int, reserved: int = 3) -> None:
        self.vocab_size, self.reserved = vocab_size, reserved

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        text = "\n".join(message["content"] for message in messages)
        return [self.reserved + byte % (self.vocab_size - self.reserved) for byte in text.encode()]

    def decode(self, ids: Sequence[int], raw: bool = False) -> str:
        return " ".join(map(str, ids))


class TokenizerCodec:
    """A Hugging Face tokenizer with its chat template; without one, messages are joined by blank lines.

    Text that spells a special token stays text: it never becomes that token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.special = [token.content for token in tokenizer.added_tokens_decoder.values()]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if any(token in message["content"] for message in messages for token in self.special):
            return self._encode_apart(messages)
        return self.tokenizer(self._render(messages), add_special_tokens=not self.tokenizer.chat_template).input_ids

    def decode(self, ids: Sequence[int], raw: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not raw, clean_up_tokenization_spaces=False))

    def _render(self, messages: Sequence[Message]) -> str:
        if not self.tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in messages)
        plain = [dict(message) for message in messages]
        return str(self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True))

    def _encode_apart(self, messages: Sequence[Message]) -> list[int]:
        """The template's own tokens are parsed; the messages' contents are spelled out, special tokens and all."""
        marks = [f"\ue000{n}\ue001" for n in range(len(messages))]  # private-use characters: no template writes them
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        ids = [] if self.tokenizer.chat_template else list(self.tokenizer("").input_ids)  # what precedes any text
        for n, part in enumerate(re.split("\ue000(\\d+)\ue001", self._render(marked))):
            text = messages[int(part)]["content"] if n % 2 else part  # the template may drop or repeat a message
            ids += self.tokenizer(text, add_special_tokens=False, split_special_tokens=bool(n % 2)).input_ids
        return ids
