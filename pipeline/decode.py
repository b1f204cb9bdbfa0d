"""Try one prompt: ``python -m pipeline.decode model=tiny sampler=threshold prompt="…"``, or in a notebook

from pipeline.decode import decode
decode("Tom has 4 bags of 6 pens. He loses 5. How many pens now?", "sampler.threshold=0.5")
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.errors import UserError
from samplers import stream_key


@dataclass
class DecodeResult:
    """An answer and what it cost.

    Attributes:
        tokens: ids of the visible answer, before the first end token.
        text: their text.
        nfe: forwards of the model.
        elapsed_s: wall time of decoding, seconds.
        tokens_per_forward: ``len(tokens) / nfe``.
        metadata: method, prompt template, effective settings, and every forward with what it changed (``trace``).
    """

    tokens: list[int]
    text: str
    nfe: int
    elapsed_s: float
    tokens_per_forward: float
    metadata: dict[str, Any]


def decode(prompt: str, *overrides: str, config_dir: str | None = None) -> DecodeResult:
    """Decode one prompt with a model and sampler chosen as on the command line.

    Args:
        config_dir: a folder of further options, as ``--config-dir`` on the command line.

    Raises:
        UserError: for options that don't fit, or a prompt too long for the model.
    """
    from hydra.errors import HydraException

    from pipeline.cli import sentence
    from pipeline.compose import compose
    from pipeline.overrides import keys

    try:
        cfg = compose(overrides, config_dir)
    except HydraException as error:
        raise UserError(sentence(error)) from error
    return decode_with(cfg, str(prompt), keys(list(overrides)))


def decode_with(cfg: DictConfig, prompt: str, overridden: Sequence[str] = ()) -> DecodeResult:
    """As `decode`, for a composed configuration; of the dataset only its length and block size are used.

    Args:
        overridden: keys given on the command line.
    """
    import torch

    from pipeline.config import named, plain, refuse_missing, refuse_unknown
    from pipeline.devices import device_type, refuse_slow
    from pipeline.engine import Engine, Task
    from pipeline.evaluation import load_model
    from pipeline.job import describe_model, make_dataset
    from pipeline.metrics import count_visible
    from pipeline.ngrams import corpus_of, tables_of
    from pipeline.prompts import choose_prompt
    from pipeline.rows import decided
    from pipeline.settings import refuse_mismatch, resolve

    if OmegaConf.is_missing(cfg.dataset, "path"):
        cfg.dataset.path = None  # the questions of the dataset are not read
    refuse_unknown(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
    refuse_missing(cfg)
    cfg = named(cfg, overridden)
    options, dataset = plain(cfg), make_dataset(cfg.dataset)
    dataset.validate()
    accelerator = options["trainer"]["accelerator"]
    description = describe_model(options["model"], accelerator, overridden)
    refuse_slow(description, accelerator)
    refuse_mismatch(cfg, description.facts)
    settings = resolve(cfg.sampler, dataset.gen_length, description.facts, dataset.block_size, overridden)
    template = choose_prompt(options["prompt"]["template"], description.codec, options["model"])
    try:
        ids = template.encode(description.codec, [{"role": "user", "content": prompt}]) if prompt else []
    except ValueError as error:
        raise UserError(f"prompt={prompt!r}: {error}") from error
    tables = tables_of(settings, corpus_of(settings, description))
    adapter = load_model(description, torch.device(device_type(accelerator)), options["engine"]["logits_mib"])
    task = Task(0, ids, settings.gen_length, stream_key(cfg.seed, 0), traced=True)
    engine = Engine(adapter, settings.sampler, max_rows=1, ngrams=tables)
    (outcome,) = engine.decode([task], settings.slots([ids], description.facts))
    if outcome.state is None or outcome.failure:
        raise UserError(f"prompt={prompt!r}: {outcome.error}")
    canvas = decided(outcome.state)
    tokens = canvas[: count_visible(canvas, description.facts.end_ids)[0]]
    nfe = outcome.counts()["nfe"]
    method = {"method": cfg.sampler.name, "prompt_template": template.template}
    metadata = {**method, "settings": settings.values, "trace": outcome.trace}
    text = description.codec.decode(tokens)
    return DecodeResult(tokens, text, nfe, outcome.seconds, len(tokens) / nfe if nfe else 0.0, metadata)


def main() -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from pipeline import config
    from pipeline.cli import Carried, for_one, guarded
    from pipeline.overrides import keys, raw
    from pipeline.quiet import quiet_libraries
    from pipeline.sweep import register_launchers

    config.register()
    register_launchers()
    sys.argv[1:] = [f"prompt.text{word[6:]}" if word.startswith("prompt=") else word for word in sys.argv[1:]]

    @hydra.main(version_base="1.3", config_path="../conf", config_name="decode")
    def one(cfg: DictConfig) -> None:
        quiet_libraries()
        try:
            if OmegaConf.is_missing(cfg.prompt, "text"):
                raise UserError('missing: prompt; give it as prompt="…"')
            result = decode_with(cfg, cfg.prompt.text, keys(raw(HydraConfig.get().overrides.task)))
        except Exception as error:
            raise Carried from error
        print(result.text)
        print(
            f"{len(result.tokens)} tokens, {result.nfe} forwards, {result.tokens_per_forward:.2f} tokens a forward, "
            f"{result.elapsed_s:.2f} s",
            file=sys.stderr,
        )

    def command() -> None:
        for_one()
        one()

    guarded(command)


if __name__ == "__main__":
    main()
