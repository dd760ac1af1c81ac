"""Block weights: how strongly a LoRA acts on each part of a diffusion model.

Text such as `double.0-3=0.5, single=0`, or a preset's name. Blocks are called what the model's modules are called,
with or without the word block: `double_blocks.0` is `double.0`. Later entries win over earlier ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import HooklineError

PRESETS = {
    "flux double only": "all=0, double=1",
    "flux single only": "all=0, single=1",
    "unet input only": "all=0, input=1",
    "unet middle only": "all=0, middle=1",
    "unet output only": "all=0, output=1",
    # B-LoRA (arXiv 2403.14572): the two attention blocks of SDXL that carry content and style.
    "sdxl content": "all=0, output.0=1",
    "sdxl style": "all=0, output.1=1",
}

_ENTRY = re.compile(r"(?P<name>[A-Za-z_]\w*)(\.(?P<first>[0-9]+)(-(?P<last>[0-9]+))?)?\s*=\s*(?P<weight>\S+)")
_WEIGHT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_MOST_BLOCKS = 1000

Block = tuple[str, int | None]
"""A block's module name and its number; None for a part that has no numbered blocks."""


@dataclass(frozen=True)
class BlockWeight:
    """One entry: `name` (or "all"), the numbers it is for (None: every one), and the factor."""

    name: str
    numbers: range | None
    weight: float

    def takes(self, block: Block) -> bool:
        name, number = block
        named = self.name in ("all", name, short_name(name))
        return named and (self.numbers is None or (number is not None and number in self.numbers))


BlockWeights = tuple[BlockWeight, ...]


def parse_block_weights(text: str) -> BlockWeights:
    """Entries `name=weight`, `name.3=weight` or `name.0-3=weight`, one per comma or line; or a preset; () for nothing.

    Raises:
        HooklineError: the entry that can't be read, and what was expected.
    """
    text = text.strip()
    if text and "=" not in text:
        if text.lower() not in PRESETS:
            raise HooklineError(
                f"block weights: {text!r} is neither a preset ({', '.join(PRESETS)}) nor entries like 'double.0-3=0.5'"
            )
        text = PRESETS[text.lower()]
    return tuple(_entry(part.strip()) for part in re.split(r"[,;\n]", text) if part.strip())


def _entry(part: str) -> BlockWeight:
    match = _ENTRY.fullmatch(part)
    if match is None:
        raise HooklineError(f"block weights: can't read {part!r}; expected 'name=weight' or 'name.0-3=weight'")
    if not _WEIGHT.fullmatch(match["weight"]) or not math.isfinite(float(match["weight"])):
        raise HooklineError(f"block weights: {part!r}: {match['weight']!r} is not a number")
    if match["first"] is None:
        return BlockWeight(match["name"], None, float(match["weight"]))
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    if match["name"] == "all" or not first <= last < first + _MOST_BLOCKS:
        raise HooklineError(f"block weights: {part!r}: not a range of blocks")
    return BlockWeight(match["name"], range(first, last + 1), float(match["weight"]))


def block_of(weight_key: str) -> Block:
    """The block that a diffusion model's parameter belongs to."""
    parts = weight_key.removeprefix("diffusion_model.").split(".")
    return (parts[0], int(parts[1])) if len(parts) > 2 and parts[1].isdigit() else (parts[0], None)


def short_name(name: str) -> str:
    return re.sub(r"_(blocks?|layers?)$", "", name)


def block_factors(
    weights: BlockWeights, keys: Iterable[str], model_keys: Iterable[str], model: str
) -> dict[str, float]:
    """Factor per weight key of a LoRA.

    Raises:
        HooklineError: names every block that the model (with parameters `model_keys`) does not have.
    """
    blocks = {block_of(key) for key in model_keys if key.startswith("diffusion_model.")}
    unknown = [name for entry in weights for name in _unknown(entry, blocks)]
    if unknown:
        raise HooklineError(
            f"block weights: {model} has no {', '.join(unknown[:8])}{' ...' if unknown[8:] else ''}; "
            f"it has {', '.join(_listed(blocks))}"
        )
    factors = {}
    for key in keys:
        block = block_of(key)
        factors[key] = next((entry.weight for entry in reversed(weights) if entry.takes(block)), 1.0)
    return factors


def _unknown(entry: BlockWeight, blocks: set[Block]) -> list[str]:
    if entry.numbers is None:
        return [] if any(entry.takes(block) for block in blocks) else [entry.name]
    known = {number for name, number in blocks if entry.name in (name, short_name(name))}
    return [f"{entry.name}.{number}" for number in entry.numbers if number not in known]


def _listed(blocks: set[Block]) -> list[str]:
    """`double.0-18`, `img_in`, ..., numbered ones first."""
    numbers: dict[str, list[int]] = {}
    for name, number in blocks:
        numbers.setdefault(short_name(name), []).extend([] if number is None else [number])
    spans = [f"{name}.{min(found)}-{max(found)}" for name, found in sorted(numbers.items()) if found]
    return [*spans, *sorted(name for name, found in numbers.items() if not found)]
