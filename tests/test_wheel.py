"""The built wheel, in a folder that knows nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import OFFLINE, ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents and console script, apart from the checkout."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    source = tmp_path_factory.mktemp("source") / "blockdiff"
    _copy_tracked(source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)], check=True
    )
    (wheel,) = wheels.glob("blockdiff-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


def _copy_tracked(target: Path) -> None:
    """The files a build may see, in a fresh folder, so that building leaves nothing in the checkout."""
    import shutil

    for name in ("pipeline", "samplers", "adapters", "conf"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)


def _run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_runs_from_a_foreign_folder_as_module_and_as_script(installed: Path, tmp_path: Path) -> None:
    common = ["dataset.limit=4", "logger=none"]
    _run(
        installed,
        tmp_path,
        sys.executable,
        "-m",
        "pipeline",
        "model=tiny_ar",
        "sampler=autoregressive",
        "run=a",
        *common,
    )
    _run(installed, tmp_path, sys.executable, str(installed / "bin" / "blockdiff"), "model=tiny", "run=b", *common)
    for run in ("a", "b"):
        assert len((tmp_path / "outputs" / run / "samples.jsonl").read_text().splitlines()) == 4
    listed = _run(installed, tmp_path, sys.executable, str(installed / "bin" / "blockdiff"), "status", "outputs/*")
    assert listed.stdout.count("done") == 2


def test_the_wheel_holds_every_option_and_both_models(installed: Path) -> None:
    for part in ("conf", "adapters/tiny"):
        in_checkout = {path.relative_to(ROOT) for path in (ROOT / part).rglob("*") if path.is_file()}
        in_wheel = {path.relative_to(installed) for path in (installed / part).rglob("*") if path.is_file()}
        missing = {path for path in in_checkout - in_wheel if "__pycache__" not in path.parts}
        assert not missing
