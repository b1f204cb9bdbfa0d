"""``python -m pipeline.verify model=… --reference dump.safetensors``: our model against the authors' code.

The dump is written by ``tools/dump_reference.py`` in the authors' environment. Compared are the ids of the prompts, the
logits and, where a sampler is named, the answers. Exit code 0 if all agree within the tolerance, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.reference import FAMILIES, Reference, read_reference

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from adapters.description import Description
    from pipeline.agreement import Finding, ForwardResult
    from pipeline.settings import Settings


def verify(overrides: Sequence[str], path: str, config_dir: str | None = None) -> bool:
    """Compare a model with a dump and print what was found; whether all agrees.

    Raises:
        UserError: for a dump that cannot be read, or options or a model that do not fit it.
    """
    import torch

    from pipeline.agreement import coarser, compare_forward, compare_prompts
    from pipeline.answers import compare_answers
    from pipeline.compose import compose
    from pipeline.config import named, plain
    from pipeline.devices import device_type, refuse_absent_devices, refuse_slow
    from pipeline.evaluation import load_model
    from pipeline.job import describe_model
    from pipeline.overrides import keys

    reference = read_reference(path)
    cfg = compose([*_named_sampler(reference, overrides), *overrides], config_dir)
    options, trainer = plain(named(cfg, keys(list(overrides))).model), plain(cfg.trainer)
    refuse_absent_devices(**trainer)
    if options["kind"] == "toy":
        raise UserError(f"model={options['name']} has no weights to verify: choose a model of a published family")
    options["dtype"] = options["dtype"] or reference.dtype  # like with like
    accelerator = trainer["accelerator"]
    description = describe_model(options, accelerator, keys(list(overrides)))
    refuse_slow(description, accelerator)
    _refuse_mismatch(reference, description)
    settings = _settings(cfg, reference, overrides, description)
    prompts = compare_prompts(reference, description.codec)
    adapter = load_model(description, torch.device(device_type(accelerator)), cfg.engine.logits_mib)
    dtype = coarser(reference.dtype, description.dtype)
    forwards = [compare_forward(adapter, forward, dtype) for forward in reference.forwards]
    slack = max((forward.slack for forward in forwards), default=0.0)
    answers = compare_answers(adapter, reference, settings, slack) if settings else None
    _note_end_ids(reference, description)
    return _report(reference, (prompts, forwards, answers), dtype)


# ---- what fits -------------------------------------------------------------------------------------------------------


def _named_sampler(reference: Reference, overrides: Sequence[str]) -> list[str]:
    """The sampler that the dump names, as overrides; none if the command line names one."""
    ours = reference.decoding.ours if reference.decoding else None
    if not ours or any(word.startswith("sampler=") for word in overrides):
        return []
    return [f"sampler={ours['sampler']}", *(f"sampler.{key}={ours[key]}" for key in ours if key != "sampler")]


def _settings(
    cfg: DictConfig, reference: Reference, overrides: Sequence[str], description: Description
) -> Settings | None:
    """The sampler to decode with; None if there are no answers, or nobody named a sampler."""
    from pipeline.settings import refuse_mismatch, resolve

    decoding = reference.decoding
    named = any(word.startswith("sampler=") for word in overrides)
    if not decoding or not reference.answers or not (named or decoding.ours):
        return None
    refuse_mismatch(cfg, description.facts)
    settings = resolve(cfg.sampler, decoding.gen_length, description.facts, None)
    if settings.gen_length != decoding.gen_length:
        raise UserError(
            f"sampler={cfg.sampler.name} makes answers of {settings.gen_length} slots, the reference has "
            f"{decoding.gen_length}: leave out what sets the canvas"
        )
    return settings


def _refuse_mismatch(reference: Reference, description: Description) -> None:
    facts, name = description.facts, description.options.name
    of = f"it is of {reference.about['model']}"
    family = reference.about["family"]
    if description.family.name not in FAMILIES[family]:
        raise UserError(f"model={name} is a {description.family.name}, the reference of the family {family}: {of}")
    if reference.vocab_size != facts.vocab_size:
        raise UserError(
            f"model={name} has {facts.vocab_size} logits a position, the reference {reference.vocab_size}: {of}"
        )
    if reference.mask_id != facts.mask_id:
        raise UserError(
            f"model={name} has the mask id {facts.mask_id}, the reference {reference.mask_id}: {of}, "
            "or set model.mask_id"
        )
    for forward in reference.forwards:
        if forward.attend.pattern not in facts.attentions:
            raise UserError(
                f"model={name} attends {facts.attention}, the reference was made with {forward.attend.pattern}: {of}"
            )
    longest = max((len(forward.ids) for forward in reference.forwards), default=0)
    if facts.max_positions is not None and longest > facts.max_positions:
        raise UserError(f"model={name} knows {facts.max_positions} positions, the reference has {longest}")


def _note_end_ids(reference: Reference, description: Description) -> None:
    """Other end ids count where an answer is over elsewhere; where none is they are told all the same."""
    ours, theirs = sorted(description.facts.end_ids), sorted(reference.end_ids)
    if ours != theirs:
        print(f"note: answers end with one of {ours} here, with one of {theirs} in the reference")


# ---- what is said ----------------------------------------------------------------------------------------------------


def _report(
    reference: Reference, results: tuple[list[Finding] | None, list[ForwardResult], list[Finding] | None], dtype: str
) -> bool:
    from rich.table import Table

    from pipeline.agreement import tolerance_in_words
    from pipeline.table import console

    prompts, forwards, answers = results
    about = reference.about
    print(f"reference: {about['model']} ({about['family']}), {reference.dtype} on {about['device']}")
    table = Table(title=f"tolerance: {tolerance_in_words(dtype)}", title_justify="left")
    for title in ("forward", "largest difference", "of the largest logit", "root mean square", "argmax agrees", ""):
        table.add_column(title, justify="left" if title in ("forward", "") else "right")
    for result in forwards:
        same = f"{result.compared - len(result.differing)} of {result.compared}"
        verdict = "ok" if result.agrees else "DIFFERS"
        figures = (f"{value:.2e}" for value in (result.absolute, result.relative, result.spread))
        table.add_row(result.name, *figures, same, verdict)
    console().print(table)
    for result in forwards:
        for row, ours, theirs, gap in result.differing[:1]:
            print(f"{result.name}: first differing argmax at row {row}: {ours} here, {theirs} there, margin {gap:.2e}")
    known, all_ = sum(text is not None for text in reference.texts), len(reference.prompts)
    _say("prompts", prompts, (known, all_), "no text is known")
    _say("answers", answers, (len(reference.answers), all_), _why_not(reference))
    found = [finding for findings in (prompts, answers) for finding in findings or [] if not finding.tie]
    agrees = not found and all(result.agrees for result in forwards)
    print("agrees with the reference" if agrees else "does not agree with the reference")
    return agrees


def _say(what: str, findings: list[Finding] | None, counts: tuple[int, int], why_not: str) -> None:
    """How many agree; of ``counts``, those that were compared and all, the second is told where it is another."""
    if findings is None:
        print(f"{what}: not compared, {why_not}")
        return
    compared, all_ = counts
    part = "" if compared == all_ else f", {compared} of {all_} compared: the reference lacks the rest"
    print(f"{what}: {compared - len(findings)} of {compared} are equal{part}")
    for finding in findings:
        print(f"  {finding.text}")


def _why_not(reference: Reference) -> str:
    if not reference.answers or not reference.decoding:
        return "the reference has none"
    return f"no sampler is named: add sampler=… for {reference.decoding.settings}"


def main() -> None:
    """The command; exit code 0, 1 for a difference, 2 for bad input."""
    from pipeline.cli import guarded, refuse_sweep
    from pipeline.quiet import quiet_libraries

    guarded(lambda: refuse_sweep(sys.argv[1:]))
    parser = argparse.ArgumentParser(prog="python -m pipeline.verify", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for a run: model=… sampler=…")
    parser.add_argument("--reference", required=True, help="file written by tools/dump_reference.py")
    parser.add_argument("--config-dir", help="a folder of further options")
    options: Any = parser.parse_intermixed_args()

    def checked() -> None:
        quiet_libraries()
        sys.exit(0 if verify(options.overrides, options.reference, options.config_dir) else 1)

    guarded(checked)


if __name__ == "__main__":
    main()
