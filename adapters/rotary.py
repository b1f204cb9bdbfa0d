"""How positions turn queries and keys, as a published configuration says it: in the words of transformers 4 or 5."""

from __future__ import annotations

from typing import Any

from adapters.keys import Json, is_number, shown

NEEDED = {  # settings of each kind; the others follow the length of the longest row, so that rows would not be alone
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_OWN = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_NUMBERS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
)


def rotary(config: Json) -> dict[str, Any]:
    """The native ``rope_parameters``.

    Raises:
        KeyError: if the base of the frequencies is stated nowhere.
        ValueError: one sentence, if a setting is not served.
    """
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = {key: value for key, value in (config.get(name) or {}).items() if value is not None}
    if name == "rope_parameters" and config.get("rope_scaling") not in (None, {}, config["rope_parameters"]):
        raise ValueError("rope_parameters and rope_scaling are both stated and differ: leave one out")
    kind = given.get("rope_type", given.get("type", "default"))
    _refuse(name, kind, given)
    theta = _agreed(config, given, "rope_theta")
    if theta is None:
        raise KeyError("rope_theta")
    settings = {key: value for key, value in given.items() if key not in _OWN}
    return {"rope_type": kind, "rope_theta": float(theta), **settings}


def rotary_share(config: Json) -> float:
    """Part of each head that is turned, of an architecture that turns the first part only.

    Raises:
        KeyError: if it is stated nowhere.
        ValueError: if it is stated twice, differently.
    """
    share = _agreed(config, config.get("rope_parameters") or {}, "partial_rotary_factor")
    turned = config.get("rotary_dim")
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if share is None and turned is None:
        raise KeyError("partial_rotary_factor")
    if share is None:
        return float(turned / size)
    if turned is not None and int(size * share) != turned:
        raise ValueError(f"rotary_dim={turned} is not partial_rotary_factor={share} of a head of {size}: leave one out")
    return float(share)


def _refuse(name: str, kind: Any, given: Json) -> None:
    if not isinstance(kind, str) or kind not in NEEDED:
        *most, last = NEEDED
        raise ValueError(f"{name}: rope_type={shown(kind)} is not served: use {', '.join(most)} or {last}")
    if absent := [key for key in NEEDED[kind] if key not in given]:
        raise ValueError(f"{name} of rope_type={kind} lacks {absent[0]}")
    for key, value in given.items():
        if key in ("rope_type", "type"):
            continue
        if key in ("truncate", "finetuned") and isinstance(value, bool):
            continue
        if key not in (*_NUMBERS, *_OWN):
            raise ValueError(f"{name}: {key}={shown(value)} is not served: leave it out")
        if not is_number(value) or value <= 0:
            raise ValueError(f"{name}: {key}={shown(value)} is out of range: use a number above 0")


def _agreed(config: Json, given: Json, key: str) -> Any:
    """A setting that may stand beside the others or among them."""
    inner, outer = given.get(key), config.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"{key}={shown(outer)} is {shown(inner)} among the rotary settings: leave one out")
    return outer if inner is None else inner
