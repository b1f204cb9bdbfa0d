"""How a question is put to the model: in its chat template, or as it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.data.base import Sample
from pipeline.errors import UserError
from pipeline.runs import settings_hash

if TYPE_CHECKING:
    from adapters.text import Message, TextCodec

TEMPLATES = ("auto", "chat", "raw")


@dataclass(frozen=True)
class Prompt:
    """What ``prompt.template`` comes to for one model.

    Attributes:
        template: ``chat``, or ``raw``: the messages' texts joined by blank lines, for base models.
        source: of a chat template ``model.chat_template``, ``tokenizer`` or ``family``; of raw text ``option``, or
            ``no chat template``.
        own: the Jinja text of ``model.chat_template``, where that is the source.
    """

    template: str
    source: str
    own: str | None = None

    @property
    def protocol(self) -> dict[str, str]:
        """Its part of the question put to a model; that each has a chat template of its own makes no difference."""
        own = {"chat_template": settings_hash(self.own)} if self.own else {}
        return {"prompt": self.template, **own}

    def encode(self, codec: TextCodec, messages: Iterable[Message]) -> list[int]:
        """Ids of a prompt.

        Raises:
            ValueError: one sentence, if the template refuses the messages.
        """
        return (codec.encode_chat if self.template == "chat" else codec.encode_raw)(list(messages))

    def encode_all(self, codec: TextCodec, samples: Iterable[Sample]) -> list[list[int]]:
        """Ids of every sample's prompt.

        Raises:
            UserError: naming the sample whose messages cannot be encoded.
        """
        prompts = []
        for sample in samples:
            try:
                prompts.append(self.encode(codec, sample.messages))
            except ValueError as error:
                raise UserError(f"sample {sample.id}: {error}") from error
        return prompts


def choose_prompt(template: str, codec: TextCodec, model: Mapping[str, Any]) -> Prompt:
    """What ``prompt.template`` means for a model, given its options.

    Raises:
        UserError: for a value that is not known, or a chat that there is no template for.
    """
    if template not in TEMPLATES:
        raise UserError(f"prompt.template={template} is not known: use one of {', '.join(TEMPLATES)}")
    source = codec.chat_source
    if model["chat_template"] and source is None:
        raise UserError(f"model.chat_template is not used: model={model['name']} has no tokenizer, leave it out")
    if template == "chat" and source is None:
        raise UserError(
            f"prompt.template=chat: neither the tokenizer of model={model['name']} nor its family has a chat template, "
            "use prompt.template=raw, or give one as model.chat_template"
        )
    if source is None or template == "raw":
        return Prompt("raw", "option" if template == "raw" else "no chat template")
    return Prompt("chat", source, model["chat_template"])
