"""Draw docs/tradeoff.png from the points of a sweep: ``python docs/plot_tradeoff.py outputs/tradeoff/points.csv``."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw(points: pd.DataFrame, target: Path) -> None:
    """Accuracy with its 95 % interval against tokens per forward with its own, one point a threshold."""
    points = points.sort_values("sampler.threshold")
    x, y = points["tokens_per_forward"], 100 * points["accuracy"]
    around_x = [x - points["tokens_per_forward_low"], points["tokens_per_forward_high"] - x]
    around_y = [y - 100 * points["accuracy_low"], 100 * points["accuracy_high"] - y]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=150)
    axes.errorbar(x, y, xerr=around_x, yerr=around_y, fmt="o-", capsize=3, color="#1f5f8b", ecolor="#9db8cc")
    for threshold, a, b in zip(points["sampler.threshold"], x, y, strict=True):
        axes.annotate(f"{threshold:g}", (a, b), textcoords="offset points", xytext=(7, 6), fontsize=9)
    axes.set_xlabel("tokens per forward")
    axes.set_ylabel("accuracy, %")
    axes.set_title(
        f"sampler=threshold on model=tiny, {int(points['samples'].iloc[0])} questions, by threshold", fontsize=10
    )
    axes.set_ylim(40, 106)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    draw(pd.read_csv(sys.argv[1]), Path(__file__).with_name("tradeoff.png"))
