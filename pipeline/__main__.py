"""``python -m pipeline``: decode a benchmark, score it, log it."""

from pipeline.cli import run

if __name__ == "__main__":
    run()
