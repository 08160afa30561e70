"""Switch off the dropout that a model's own config.json asks for.

Each rank draws its own random numbers. With dropout, the loss therefore depends on the gear and the number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ("drop", "jitter_noise")  # parts of the names of rates, such as attn_pdrop and encoder_layerdrop
OTHER_HEADS = ("classifier", "summary")  # a causal language model does not have these heads


def rates(config: PretrainedConfig) -> dict[str, float]:
    """Return the rates above 0 in a config and its sub-configs, by name, such as text_config.attention_dropout."""
    found: dict[str, float] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_diff_dict"):  # a sub-config
            found |= {f"{name}.{inner}": rate for inner, rate in rates(value).items()}
        elif any(part in name for part in NAMES) and not name.startswith(OTHER_HEADS):
            is_rate = isinstance(value, int | float) and not isinstance(value, bool)
            found |= {name: float(value)} if is_rate and value > 0 else {}
    return found


def set_rates(config: PretrainedConfig, values: dict[str, float]) -> None:
    """Set rates in a config and its sub-configs, by the names that `rates` returns."""
    for path, rate in values.items():
        *groups, name = path.split(".")
        owner = config
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, name, rate)


def switch_off(config: PretrainedConfig) -> dict[str, float]:
    """Set all rates of a config to 0. Return the rates that it had."""
    before = rates(config)
    set_rates(config, dict.fromkeys(before, 0.0))
    return before


def listed(values: dict[str, float]) -> str:
    """Return rates as text, such as attn_pdrop 0.1, embd_pdrop 0.1."""
    return ", ".join(f"{name} {rate:g}" for name, rate in values.items())
