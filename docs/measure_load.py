"""Peak memory of loading: writes a random LLaDA-shaped checkpoint of 8 GB in shards, loads it in a process of its own.

    python docs/measure_load.py [--folder /tmp] [--layers 15] [--dtype bfloat16 float16]

The child's peak is `ru_maxrss`, the figure that ``/usr/bin/time -v`` prints as its maximum resident set size, less what
a process has resident after its imports. The bound is 1.2 times the largest shard plus the model.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
SHARD = 1.5e9  # bytes after which a new shard is begun
CONFIG = {  # LLaDA-8B's, but for the number of layers
    **{"model_type": "llada", "architectures": ["LLaDAModelLM"], "vocab_size": 126464, "embedding_size": 126464},
    **{"d_model": 4096, "mlp_hidden_size": 12288, "n_heads": 32, "n_kv_heads": 32, "max_sequence_length": 4096},
    **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "mask_token_id": 126336, "eos_token_id": 126081},
}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a published LLaDA checkpoint."""
    vocabulary, width, inner = 126464, 4096, 12288
    block: dict[str, tuple[int, ...]] = {"attn_norm": (width,), "ff_norm": (width,), "attn_out": (width, width)}
    block |= {f"{name}_proj": (width, width) for name in "qkv"}
    block |= {"ff_proj": (inner, width), "up_proj": (inner, width), "ff_out": (width, inner)}
    found: dict[str, tuple[int, ...]] = {"wte": (vocabulary, width)}
    for layer in range(layers):
        found |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    found |= {"ln_f": (width,), "ff_out": (vocabulary, width)}
    return {f"model.transformer.{name}.weight": shape for name, shape in found.items()}


def write(folder: Path, layers: int) -> None:
    """One shard in memory at a time."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "n_layers": layers}))
    weight_map: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    for name, shape in shapes(layers).items():
        held[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
        if sum(tensor.nbytes for tensor in held.values()) > SHARD:
            held = _flush(folder, held, weight_map)
    _flush(folder, held, weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _flush(folder: Path, held: dict[str, torch.Tensor], weight_map: dict[str, str]) -> dict[str, torch.Tensor]:
    shard = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
    weight_map |= dict.fromkeys(held, shard)
    save_file(held, folder / shard)
    return {}


def load(folder: Path, dtype: str) -> None:
    """In the child: load, and print what it took as JSON."""
    sys.path.insert(0, str(ROOT))
    from transformers import LlamaForCausalLM  # noqa: F401 - imported by the loader, counted before

    from adapters.description import describe
    from adapters.loading import load as load_model
    from adapters.places import ModelOptions

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.monotonic()
    adapter = load_model(describe(ModelOptions("random", path=str(folder), dtype=dtype)), torch.device("cpu"))
    seconds = time.monotonic() - start
    model = sum(parameter.nbytes for parameter in adapter.model.parameters())  # type: ignore[attr-defined]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"before": before, "peak": peak, "model": model, "seconds": seconds}))


def report(folder: Path, dtype: str) -> None:
    """One line a dtype, in 1e9 bytes."""
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    command = [sys.executable, __file__, "--load", str(folder), "--dtype", dtype]
    timed = ["/usr/bin/time", "-v", *command] if Path("/usr/bin/time").exists() else command
    done = subprocess.run(timed, capture_output=True, text=True, check=True)
    took = json.loads(done.stdout.splitlines()[-1])
    bound = took["model"] + 1.2 * largest
    used = took["peak"] - took["before"]
    gigabytes = {
        "model": took["model"],
        "largest shard": largest,
        "peak": took["peak"],
        "before": took["before"],
    }
    told = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in gigabytes.items())
    print(f"{dtype}: {told}, so {used / 1e9:.2f} of {bound / 1e9:.2f} allowed; {took['seconds']:.0f} s")
    print(*(line.strip() for line in done.stderr.splitlines() if "Maximum resident" in line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        return load(Path(arguments.load), arguments.dtype[0])
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        write(folder, arguments.layers)
        for dtype in arguments.dtype:
            report(folder, dtype)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
