"""Text to ids and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": …}
OPEN, CLOSE = "\ue000", "\ue001"  # private-use characters: no template writes them
MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")


class TextCodec(Protocol):
    """What the pipeline needs of a tokenizer."""

    chat_source: str | None  # of the chat template: ``model.chat_template``, ``tokenizer`` or ``family``; None without

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation in the chat template, up to where the answer starts.

        Raises:
            ValueError: one sentence, if there is no template, or it refuses the messages.
        """

    def encode_raw(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages' texts, joined by blank lines, as plain text that goes on."""

    def decode(self, ids: Sequence[int], raw: bool = False) -> str:
        """Text of ids; ``raw`` keeps special tokens visible."""


def joined(messages: Sequence[Message]) -> str:
    """The messages' texts without their roles."""
    return "\n\n".join(message["content"] for message in messages)


class IdCodec:
    """For models without a tokenizer: bytes of the text as ids, ids as numbers in print."""

    chat_source: str | None = None

    def __init__(self, vocab_size: int, reserved: int = 3) -> None:
        self.vocab_size, self.reserved = vocab_size, reserved

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        raise ValueError("a model without a tokenizer has no chat template")

    def encode_raw(self, messages: Sequence[Message]) -> list[int]:
        return [self.reserved + byte % (self.vocab_size - self.reserved) for byte in joined(messages).encode()]

    def decode(self, ids: Sequence[int], raw: bool = False) -> str:
        return " ".join(map(str, ids))


class TokenizerCodec:
    """A Hugging Face tokenizer with a chat template.

    Text that spells a special token stays text: it never becomes that token.

    Args:
        template: Jinja; goes before the tokenizer's own.
        family_template: Jinja; for a tokenizer that brings none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, family_template: str | None = None
    ) -> None:
        own = tokenizer.chat_template
        if isinstance(own, dict):  # templates by name
            own = own.get("default")
        found = {"model.chat_template": template, "tokenizer": own, "family": family_template}
        self.tokenizer = tokenizer
        self.chat_source = next((source for source, text in found.items() if text), None)
        self.template: str | None = found[self.chat_source] if self.chat_source else None
        self.ids = tokenizer.get_vocab()
        self.special = self._special_tokens()

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self.template is None:
            raise ValueError("there is no chat template, neither of the tokenizer nor of the family")
        return self._encode(messages, self._in_template)  # what starts a chat is the template's to write

    def encode_raw(self, messages: Sequence[Message]) -> list[int]:
        """As the protocol; an end token that the tokenizer would put behind is left out: the text is to go on."""
        return [*self._start, *self._encode(messages, joined)]

    def decode(self, ids: Sequence[int], raw: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not raw, clean_up_tokenization_spaces=False))

    def _special_tokens(self) -> dict[int, str]:
        """Tokens that no user may write, by id: the special ones, and those that look or serve like one.

        Other added tokens are words, or runs of white space, that a tokenizer learnt late.
        """
        written, unknown = self.template or "", self._parse(OPEN)  # any text may hold what the vocabulary lacks
        return {
            id_: token.content
            for id_, token in self.tokenizer.added_tokens_decoder.items()
            if not token.content.isspace()
            and id_ not in unknown
            and (token.special or token.content in written or re.fullmatch(r"<.+>|\[.+\]", token.content))
        }

    def _encode(self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> list[int]:
        """At once where the special tokens are the template's own, else with the messages' contents spelled out."""
        marks = [{**message, "content": f"{OPEN}{n}{CLOSE}"} for n, message in enumerate(messages)]
        frame = render(marks)
        ids = self._parse(render(messages))
        return ids if self._specials(ids) == self._specials(self._parse(frame)) else self._encode_apart(messages, frame)

    def _in_template(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        plain = [dict(message) for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    plain, chat_template=self.template, tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, TypeError) as error:  # a template refuses roles it does not know, and may be broken
            raise ValueError(f"the chat template ({self.chat_source}) does not take these messages: {error}") from error

    def _encode_apart(self, messages: Sequence[Message], frame: str) -> list[int]:
        """The template's own tokens are parsed; the messages' contents are spelled out, special tokens and all."""
        ids: list[int] = []
        for n, part in enumerate(MARK.split(frame)):
            if not n % 2 and (OPEN in part or CLOSE in part):
                raise ValueError("the chat template cuts a message to pieces, which cannot be done to special tokens")
            # the template may drop or repeat a message
            ids += self._spell(messages[int(part)]["content"]) if n % 2 else self._parse(part)
        return ids

    def _parse(self, text: str) -> list[int]:
        """Ids of a text whose special tokens count as such."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _spell(self, text: str) -> list[int]:
        """Ids of a text whose special tokens are text.

        Raises:
            ValueError: if the tokenizer's model itself makes such a token of a text, as some of sentencepiece do.
        """
        if self.tokenizer.is_fast:
            tokens = self._plain.encode(text, add_special_tokens=False).tokens
            ids = [self.ids[token] for token in tokens]
        else:
            ids = list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
        if made := self._specials(ids):
            raise ValueError(
                f"the text holds {self.special[made[0]]}, which this tokenizer cannot spell as text: take it out"
            )
        return ids

    def _specials(self, ids: Sequence[int]) -> list[int]:
        return [id_ for id_ in ids if id_ in self.special]

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer as it would be without special tokens.

        `transformers` can split them only where they are flagged as special, which roles often are not.
        """
        from tokenizers import Tokenizer

        described = json.loads(self.tokenizer.backend_tokenizer.to_str())
        hidden = set(self.special.values())
        described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] not in hidden]
        return Tokenizer.from_str(json.dumps(described))

    @cached_property
    def _start(self) -> list[int]:
        """What the tokenizer puts before any text."""
        bare, whole = self._parse("a"), list(self.tokenizer("a").input_ids)
        starts = [n for n in range(len(whole) - len(bare) + 1) if whole[n : n + len(bare)] == bare]
        return whole[: starts[0]] if starts else []
