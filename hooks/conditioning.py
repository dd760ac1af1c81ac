"""Attach hooks, masks and time ranges to conditioning. Inputs are never changed.

A conditioning is a list of [tensor, options]. The options written here are the host's own: `hooks`, `mask`,
`set_area_to_bounds`, `mask_strength`, `start_percent`, `end_percent`, `default`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..host import HookGroup
from .group import combine as combine_groups

Conditioning = list[list[Any]]


def set_props(
    *conditionings: Conditioning,
    hooks: HookGroup | None = None,
    mask: Tensor | None = None,
    strength: float = 1.0,
    set_cond_area: str = "default",
    timesteps: tuple[float, float] | None = None,
) -> list[Conditioning]:
    """Each conditioning with the given properties; hooks are added to those it has.

    Entries that shared a hook group share the new one too, so that they still run in one batch. `strength` weighs the
    mask [n, h, w] and does nothing without one; "mask bounds" limits the work to the mask's bounding box.
    """
    options: dict[str, Any] = {}
    if mask is not None:
        options["mask"] = mask if mask.dim() > 2 else mask.unsqueeze(0)
        options["set_area_to_bounds"] = set_cond_area != "default"
        options["mask_strength"] = strength
    if timesteps is not None:
        options["start_percent"], options["end_percent"] = timesteps
    combined: dict[int, HookGroup] = {}

    def hooks_for(entry: dict[str, Any]) -> dict[str, Any]:
        before = entry.get("hooks")
        if hooks is None:
            return {}
        if before is None:
            return {"hooks": hooks}
        if id(before) not in combined:
            combined[id(before)] = combine_groups(before, hooks)
        return {"hooks": combined[id(before)]}

    return [
        [[t, {**entry, **options, **hooks_for(entry)}] for t, entry in conditioning] for conditioning in conditionings
    ]


def set_default(*conditionings: Conditioning, hooks: HookGroup | None = None) -> list[Conditioning]:
    """Each conditioning, made to act where the others of its side leave the picture uncovered."""
    marked = [[[t, {**entry, "default": True}] for t, entry in conditioning] for conditioning in conditionings]
    return set_props(*marked, hooks=hooks)


def combine(*conditionings: Conditioning) -> Conditioning:
    """All entries, in order: they act together."""
    return [entry for conditioning in conditionings for entry in conditioning]
