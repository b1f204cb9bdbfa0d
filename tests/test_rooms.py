"""Who may touch what: the three rooms, and which imports cost something (design: "The cut")."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline.decode
import samplers
from adapters.base import MaskedLMAdapter
from tests.conftest import ROOT

FILES = {room: sorted((ROOT / room).rglob("*.py")) for room in ("samplers", "adapters", "pipeline")}
HEAVY = ("torch", "transformers", "lightning", "wandb", "datasets", "pandas", "scipy")


def imported(file: Path) -> Iterator[str]:
    """Full names of all modules a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: relative import"
            yield node.module


def packages(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(file)}


@pytest.mark.parametrize("file", FILES["samplers"], ids=lambda file: file.name)
def test_samplers_know_only_the_standard_library_and_themselves(file: Path) -> None:
    assert packages(file) <= sys.stdlib_module_names | {"samplers"}


@pytest.mark.parametrize("file", FILES["adapters"], ids=lambda file: file.name)
def test_adapters_know_neither_the_experiment_nor_which_sampler_runs(file: Path) -> None:
    assert not packages(file) & {"pipeline", "datasets", "lightning", "wandb", "hydra", "omegaconf"}
    assert not {name for name in imported(file) if name.startswith("samplers.")}, "only the public plain types"
    names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
    assert not names & {cls.__name__ for cls in samplers.SAMPLERS.values()}


def test_only_tracking_imports_wandb() -> None:
    files = [file for room in FILES.values() for file in room if "wandb" in packages(file)]
    assert files == [ROOT / "pipeline" / "tracking.py"]


def test_the_pipeline_touches_no_other_modules_internals() -> None:
    for file in FILES["pipeline"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FILES:
                assert not [a.name for a in node.names if a.name.startswith("_")], f"{file}: {node.module}"


@pytest.mark.parametrize("module", ["samplers", "pipeline", "pipeline.cli"])
def test_importing_it_costs_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_words_of_the_design_are_public() -> None:
    """Its section of that name keeps the user's own names."""
    words = {"DecodeState", "BlockDiffusionSampler", "SAMPLERS", "Forward", "Prediction", "Kind", "Role", "Law"}
    assert not words - set(samplers.__all__)
    assert {"confidence", "threshold", "autoregressive"} <= set(samplers.SAMPLERS)
    assert all(name == cls.method_name and cls.__name__ in samplers.__all__ for name, cls in samplers.SAMPLERS.items())
    assert callable(samplers.BlockDiffusionSampler.update_state)
    assert {"facts", "open", "place", "forward"} <= {*MaskedLMAdapter.__annotations__, *vars(MaskedLMAdapter)}
    result = pipeline.decode.DecodeResult.__dataclass_fields__
    assert set(result) == {"tokens", "text", "nfe", "elapsed_s", "tokens_per_forward", "metadata"}
    assert {"tokens", "mask", "confidences"} <= set(samplers.DecodeState.__dataclass_fields__)
    assert {"block_size", "steps"} <= samplers.BlockDiffusionSampler.options()
    assert "remask_ratio" in samplers.ConfidenceSampler.options()
