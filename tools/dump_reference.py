"""Write down what the authors' own code computes, in the authors' own environment, for `python -m pipeline.verify`.

    python dump_reference.py --model GSAI-ML/LLaDA-8B-Instruct --family llada \\
        --generate LLaDA/generate.py --out dump.safetensors

One file, no import of ours: Python 3.8 or later, torch, transformers (4.38 to 4.57, what the model's code needs) and
safetensors. The model's own code is run (trust_remote_code), so do this where you would run it anyway.

The dump holds, as safetensors (T tokens, V vocabulary, N of the rows):
    prompts.<i>            (T,)   ids of prompt i, rendered with the tokenizer's chat template if it has one
    forwards.<name>.ids    (T,)   input of a forward
    forwards.<name>.rows   (N,)   rows whose logits are kept, at most 32, evenly spread
    forwards.<name>.logits (N, V) float32, *raw*: row r is what the network says at position r, never shifted
    forwards.<name>.argmax (T,)   the largest logit of every row, -1 where none was computed
    forwards.<name>.margin (T,)   float32, its distance to the second largest
    decoded.<i>            (T,)   the answer to prompt i by the authors' decoder, without the prompt: it ends with, or
                                  holds, one of the end ids, or it has --length ids
and one metadata entry, ``blockdiff_reference``, a JSON object: what was run, with which versions and settings.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import sys

FORMAT = 2
PROMPTS = (
    "What is 17 plus 25?",
    "Tom has 4 bags with 6 pens each. He loses 5 pens. How many pens does he have now?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name three rivers in Europe, separated by commas.",
    "Translate into French: The weather is nice today, and we are going to the beach with our friends.",
)
ROWS = 32  # rows of logits kept a forward: 3 forwards of 32 rows of 152,000 float32 are 58 MB
MASKS = {
    "llada": 126336,
    "llada_moe": 156895,
    "llada2": 156895,
    "dream": 151666,
    "sdar": 151669,
    "fast_dllm_v2": 151665,
}
BLOCKS = {"llada2": 32, "sdar": 4, "fast_dllm_v2": 32}  # families that attend by blocks, and their published block
FAMILIES = (*MASKS, "causal")
# tokens that end an answer beside those which configuration and tokenizer name
ENDS = {"llada": ("<|endoftext|>", "<|eot_id|>"), "dream": ("<|im_end|>",)}
# the function that the file named by --generate holds
FUNCTIONS = {"llada": "generate", "llada_moe": "generate", "sdar": "block_diffusion_generate"}


class DumpError(Exception):
    """What went wrong, in one sentence."""


def main():
    options = parse()
    try:
        dump(options)
    except DumpError as fault:
        print("error: " + str(fault), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        print("error: " + first_line(error), file=sys.stderr)
        return 2
    return 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--revision", help="commit of the hub id")
    parser.add_argument("--family", required=True, choices=FAMILIES)
    parser.add_argument("--out", required=True, help="the file to write, such as dump.safetensors")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--generate", help="path of the authors' generate.py (llada, llada_moe, sdar)")
    parser.add_argument("--length", type=int, default=64, help="slots of the answers, a multiple of the block")
    parser.add_argument("--block", type=int, help="block size, if not the model's own")
    parser.add_argument("--mask-id", type=int, help="id of the mask token, if not the family's")
    return parser.parse_args()


def dump(options):
    """Run everything and write one file; a part that fails is left out and told, as long as a forward is left."""
    refuse_wrong(options)
    generate = of_file(options)
    tokenizer, config = load_small(options)
    run = Run(options, tokenizer, config, generate)
    run.model = load(options, config)
    prompts = [encode(tokenizer, text) for text in PROMPTS]
    tensors, forwards, decoded = {}, [], None
    for number, ids in enumerate(prompts):
        tensors[f"prompts.{number}"] = run.torch.tensor(ids)
    for name, ids, start in run.inputs(prompts):
        with telling(f"the forward '{name}'"):
            keep(tensors, f"forwards.{name}.", ids, start, run.logits(ids, start), run.torch)
            forwards.append({"name": name, "attend": run.attend(), "cached": start})
    if not forwards:
        raise DumpError(f"no forward of {options.model} worked: see above")
    with telling("the authors' decoder"):
        decoded = run.decode(prompts, tensors)
    about = describe(options, run, tokenizer, forwards, decoded)
    write(options.out, tensors, about)


def refuse_wrong(options):
    """All that can be known before anything is loaded."""
    family = options.family
    if options.length < 2:
        raise DumpError(f"--length={options.length} is out of range: use a whole number from 2 up")
    if family in ("llada", "llada_moe") and options.length > 32 and options.length % 32:
        raise DumpError(f"--length={options.length} is no multiple of the block of 32 that its decoder is called with")
    if options.block is not None and family not in BLOCKS:
        raise DumpError(f"--block={options.block} is not used by --family={family}, which does not attend by blocks")
    if options.block is not None and options.block < 1:
        raise DumpError(f"--block={options.block} is out of range: use a whole number from 1 up")
    if options.mask_id is not None and (options.mask_id < 0 or family == "causal"):
        raise DumpError(f"--mask-id={options.mask_id} is no mask of --family={family}: leave it out")
    if options.generate is not None and family not in FUNCTIONS:
        raise DumpError(f"--generate={options.generate} is not used by --family={family}: leave it out")
    if options.generate is not None and not os.path.isfile(options.generate):
        raise DumpError(f"--generate={options.generate} is no file")
    refuse_device(options.device)
    refuse_place(options.out)


def refuse_device(device):
    name, _, number = device.partition(":")
    if name not in ("cpu", "cuda") or (number and not (name == "cuda" and number.isdigit())):
        raise DumpError(f"--device={device} is unknown: use cuda, cuda:1 or cpu")
    torch, _ = libraries()
    if name == "cuda" and not torch.cuda.is_available():
        raise DumpError(f"--device={device}: torch sees no GPU here, use --device=cpu")
    if number and int(number) >= torch.cuda.device_count():
        raise DumpError(f"--device={device}: torch sees {torch.cuda.device_count()} GPUs here")


def refuse_place(path):
    """Try whether the file can be written, as only that tells."""
    if os.path.isdir(path):
        raise DumpError(f"--out={path} is a folder: name a file, such as dump.safetensors in it")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise DumpError(f"--out={path}: there is no folder {os.path.dirname(path)}")
    try:
        open(part_of(path), "wb").close()
        os.remove(part_of(path))
        if os.path.exists(path):
            open(path, "ab").close()
    except OSError as error:
        raise DumpError(f"--out={path} cannot be written ({error.strerror})") from error


def part_of(path):
    return path + ".part"  # what is written first, so that an older dump stays whole until the new one is


def libraries():
    try:
        import safetensors.torch  # noqa: F401 - what writes the file must be there before all is computed
        import torch
        import transformers
    except ImportError as error:
        raise DumpError(f"{error}: install torch, transformers and safetensors as the authors say") from error
    return torch, transformers


def of_file(options):
    """The authors' function in the file named by --generate; None, with a note, if no file is."""
    path, name = options.generate, FUNCTIONS.get(options.family)
    if name and not path:
        print("note: --generate is not given, so no answers are decoded", file=sys.stderr)
    if not path:
        return None
    sys.path.insert(0, os.path.dirname(path) or ".")  # what it imports lies beside it
    spec = importlib.util.spec_from_file_location("authors_generate", path)
    if spec is None or spec.loader is None:
        raise DumpError(f"--generate={path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise DumpError(f"--generate={path} could not be imported ({first_line(error)})") from error
    if not callable(getattr(module, name, None)):
        raise DumpError(f"--generate={path} has no function {name}")
    return getattr(module, name)


def where(options):
    return {"trust_remote_code": options.family != "causal", "revision": options.revision}


def load_small(options):
    """Tokenizer and configuration."""
    _, transformers = libraries()
    try:
        config = transformers.AutoConfig.from_pretrained(options.model, **where(options))
        return transformers.AutoTokenizer.from_pretrained(options.model, **where(options)), config
    except Exception as error:
        raise not_loaded(options, error) from error


def load(options, config):
    """The model, by its own code."""
    torch, transformers = libraries()
    mapped = getattr(config, "auto_map", None) or {}
    only_body = mapped and "AutoModelForCausalLM" not in mapped  # Dream names its whole model AutoModel
    loader = transformers.AutoModel if only_body else transformers.AutoModelForCausalLM
    attention = {"attn_implementation": "sdpa"} if options.family == "llada2" else {}  # its eager path hides all
    dtype = getattr(torch, options.dtype)
    try:
        model = loader.from_pretrained(options.model, torch_dtype=dtype, **attention, **where(options))
        return model.to(options.device).eval()
    except Exception as error:
        raise not_loaded(options, error) from error


def not_loaded(options, error):
    torch, transformers = libraries()
    return DumpError(
        f"--model={options.model} could not be loaded ({first_line(error)}): use the versions its authors name, "
        f"here are torch {torch.__version__} and transformers {transformers.__version__}"
    )


def encode(tokenizer, text):
    """Ids of a question, up to where the answer starts."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


class Run:
    """The model with all that its forwards and its decoder need to know."""

    def __init__(self, options, tokenizer, config, generate):
        """Without the model, which is loaded once all this is known to fit."""
        self.torch, _ = libraries()
        self.options, self.tokenizer, self.model, self.generate = options, tokenizer, None, generate
        self.config = config
        self.family, self.device, self.length = options.family, options.device, options.length
        own = getattr(config, "block_size", None) or getattr(config, "bd_size", None)
        self.block = (options.block or own or BLOCKS[self.family]) if self.family in BLOCKS else None
        self.mask = self.mask_id()
        if self.block and self.length % self.block:
            raise DumpError(f"--length={self.length} is no multiple of the block, {self.block}")

    def mask_id(self):
        if self.family == "causal":
            return None
        found = self.options.mask_id
        for said in (getattr(self.config, "mask_token_id", None), getattr(self.tokenizer, "mask_token_id", None)):
            found = said if found is None else found
        found = MASKS[self.family] if found is None else found
        size = getattr(self.config, "embedding_size", None) or getattr(self.config, "vocab_size", None)
        if size is not None and found >= size:
            raise DumpError(
                f"the mask id {found} is none of the {size} of --model={self.options.model}: give --mask-id"
            )
        return found

    def end_ids(self):
        """All ids that end an answer, by configuration, tokenizer and family."""
        found = set()
        generation = getattr(self.model, "generation_config", None)
        for said in (self.config, generation, self.tokenizer):
            value = getattr(said, "eos_token_id", None)
            found.update(value if isinstance(value, (list, tuple)) else [value])
        vocabulary = self.tokenizer.get_vocab()
        found.update(vocabulary.get(token) for token in ENDS.get(self.family, ()))
        return sorted(id for id in found if id is not None)

    def attend(self):
        """What a position may see, counted from position 0."""
        if self.block:
            return {"pattern": "blocks", "first": 0, "size": self.block}
        return {"pattern": "causal" if self.family == "causal" else "full", "first": 0, "size": 0}

    def inputs(self, prompts):
        """Three forwards as (name, ids, length of the cached prefix); what stands in the answer is arbitrary text."""
        text = [id for ids in prompts for id in ids]  # ids that the model knows, in no sensible order
        answer = [text[(7 * slot + 3) % len(text)] for slot in range(self.length)]
        if self.family == "causal":
            yield "prompt", prompts[0], 0
            yield "answered", prompts[1] + answer, 0
            yield "cached", prompts[2] + answer, len(prompts[2])
            return
        half = [token if slot % 2 else self.mask for slot, token in enumerate(answer)]
        yield "masked", prompts[0] + [self.mask] * self.length, 0
        yield "half", prompts[1] + half, 0
        last = prompts[2] + half
        if self.family in ("sdar", "fast_dllm_v2"):  # whose own code has a cache, exact for blocks
            last = last[: len(last) - len(last) % self.block]
            yield "cached", last, len(last) - self.block
        else:
            yield "last", prompts[2] + answer[: self.length // 2] + [self.mask] * (self.length // 2), 0

    def logits(self, ids, start):
        """Raw logits (T - start, V) of the positions from `start`, those before it read from a cache if it is not 0."""
        torch = self.torch
        row = torch.tensor([ids], device=self.device)
        with torch.no_grad():
            found = self.call(row, start)
        if tuple(found.shape[:2]) != (1, len(ids) - start):
            raise DumpError(f"the model gave logits of shape {tuple(found.shape)} for {len(ids) - start} tokens")
        return found[0].float().cpu()

    def call(self, row, start):
        torch, model, length = self.torch, self.model, row.shape[1]
        places = torch.arange(length, device=self.device)[None]
        if self.family in ("llada", "llada_moe", "dream"):
            return model(row).logits
        if self.family == "llada2":
            mask = self.visible(length).to(next(model.parameters()).dtype).log()[:, None]  # 0 and -inf, (1, 1, T, T)
            return model(row, attention_mask=mask, position_ids=places).logits
        if self.family == "sdar":
            from transformers.cache_utils import DynamicCache

            cache, mask = DynamicCache(), self.visible(length)
            if start:
                model(row[:, :start], attention_mask=mask[:, :start, :start], position_ids=places[:, :start],
                      past_key_values=cache, use_cache=True, store_kv=True)  # fmt: skip
            return model(row[:, start:], attention_mask=mask[:, start:], position_ids=places[:, start:],
                         past_key_values=cache, use_cache=True, store_kv=not start).logits  # fmt: skip
        if self.family == "fast_dllm_v2":
            if not start:
                return model(input_ids=row, use_cache=True, update_past_key_values=True, block_size=self.block).logits
            held = model(input_ids=row[:, :start], use_cache=True, update_past_key_values=True, block_size=self.block)
            return model(input_ids=row[:, start:], use_cache=True, past_key_values=held.past_key_values,
                         update_past_key_values=False, block_size=self.block).logits  # fmt: skip
        if not start:
            return model(row, use_cache=False).logits
        held = model(row[:, :start], use_cache=True).past_key_values
        return model(row[:, start:], past_key_values=held, use_cache=True).logits

    def visible(self, length):
        """(1, T, T) bool: a position sees its own block and those before it."""
        block = self.torch.arange(length, device=self.device) // self.block
        return (block[None, :] <= block[:, None])[None]

    # ---- decoding ----------------------------------------------------------------------------------------------------

    def decode(self, prompts, tensors):
        """Decode every prompt greedily; returns what was called with which arguments, and our words for them."""
        call, settings, ours = self.decoder()
        if call is None:
            return None
        ends = set(self.end_ids())
        for number, ids in enumerate(prompts):
            row = self.torch.tensor([ids], device=self.device)
            with self.torch.no_grad():
                found = call(row)
            found = getattr(found, "sequences", found)
            out = [int(token) for token in (found[0] if found.ndim == 2 else found)]
            answer = out[len(ids) :] if out[: len(ids)] == ids else out  # LLaDA2's comes without the prompt
            answer = answer[: self.length]  # whole blocks may take some more
            if len(answer) < self.length and not set(answer) & ends:
                print(f"warning: the answer to prompt {number} is left out: it neither ends nor has {self.length} ids",
                      file=sys.stderr)  # fmt: skip
                continue
            tensors[f"decoded.{number}"] = self.torch.tensor(answer, dtype=self.torch.int64)
        return {"settings": settings, "ours": ours, "gen_length": self.length}

    def decoder(self):
        """(function of a row, its arguments, the same in our options or None where nothing of ours is equal)."""
        length, block, model = self.length, self.block, self.model
        if self.family in ("llada", "llada_moe"):
            generate = self.generate
            arguments = {"steps": length, "gen_length": length, "block_length": min(32, length), "temperature": 0.0,
                         "cfg_scale": 0.0, "remasking": "low_confidence", "mask_id": self.mask}  # fmt: skip
            ours = {"sampler": "confidence", "block_size": min(32, length), "steps": length}
            return generate and (lambda row: generate(model, row, **arguments)), arguments, ours
        if self.family == "sdar":
            generate = self.generate
            arguments = {"gen_length": length, "block_length": block, "denoising_steps": block, "temperature": 1.0,
                         "top_k": 1, "top_p": 1.0, "remasking_strategy": "low_confidence_static",
                         "confidence_threshold": 0.85, "mask_id": self.mask}  # fmt: skip
            return generate and (lambda row: generate(model, {"input_ids": row}, **arguments)), arguments, None
        if self.family == "dream":
            arguments = {"max_new_tokens": length, "steps": length, "temperature": 0.0, "alg": "entropy"}
            return (lambda row: model.diffusion_generate(row, **arguments)), arguments, None
        if self.family == "llada2":
            arguments = {"gen_length": length, "block_length": block, "steps": block, "temperature": 0.0,
                         "eos_early_stop": False}  # fmt: skip
            return (lambda row: model.generate(inputs=row, **arguments)), arguments, None
        if self.family == "fast_dllm_v2":
            arguments = {"max_new_tokens": length, "block_size": block, "small_block_size": min(8, block),
                         "threshold": 0.9}  # fmt: skip
            return (lambda row: model.generate(row, tokenizer=self.tokenizer, **arguments)), arguments, None
        arguments = {"max_new_tokens": length, "do_sample": False}
        ours = {"sampler": "autoregressive"}
        return (lambda row: model.generate(row, attention_mask=self.torch.ones_like(row), **arguments)), arguments, ours


def keep(tensors, prefix, ids, start, logits, torch):
    """File a forward: all of its argmaxes, and the logits of a spread of its rows."""
    count = min(ROWS, len(logits))
    rows = torch.linspace(0, len(logits) - 1, count).round().long()
    best = logits.topk(2, dim=-1)
    unknown = torch.full((start,), -1)
    tensors[prefix + "ids"] = torch.tensor(ids)
    tensors[prefix + "rows"] = rows + start
    tensors[prefix + "logits"] = logits[rows].contiguous()
    tensors[prefix + "argmax"] = torch.cat((unknown, best.indices[:, 0]))
    tensors[prefix + "margin"] = torch.cat((unknown.float(), best.values[:, 0] - best.values[:, 1]))


def describe(options, run, tokenizer, forwards, decoded):
    import transformers

    return {
        "format": FORMAT,
        "family": options.family,
        "model": options.model,
        "revision": options.revision or getattr(run.config, "_commit_hash", None),
        "dtype": options.dtype,
        "device": run.torch.cuda.get_device_name(options.device)
        if options.device.startswith("cuda")
        else options.device,
        "versions": {
            "python": platform.python_version(),
            "torch": run.torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": "raw",
        "mask_id": run.mask,
        "end_ids": run.end_ids(),
        "chat_template": bool(getattr(tokenizer, "chat_template", None)),
        "prompts": [{"text": text} for text in PROMPTS],
        "forwards": forwards,
        "decoding": decoded,
    }


def write(path, tensors, about):
    from safetensors.torch import save_file

    try:
        save_file(tensors, part_of(path), metadata={"blockdiff_reference": json.dumps(about)})
        os.replace(part_of(path), path)
    except Exception as error:
        raise DumpError(f"--out={path} could not be written: {first_line(error)}") from error
    answers = sum(name.startswith("decoded.") for name in tensors)
    print(f"wrote {path}: {len(about['forwards'])} forwards, {answers} answers")


@contextlib.contextmanager
def telling(what):
    """Go on without a part that fails, and say so."""
    try:
        yield
    except DumpError as fault:
        print(f"warning: {what} is left out: {fault}", file=sys.stderr)
    except Exception as error:
        print(f"warning: {what} is left out: {first_line(error)}", file=sys.stderr)


def first_line(error):
    return "{}: {}".format(type(error).__name__, str(error).strip().partition("\n")[0])


if __name__ == "__main__":
    sys.exit(main())
