"""Conditioning on its way to a model call: areas, masks, time ranges, and the rows of a batch."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .hooks import HookGroup


class CONDRegular:
    """A tensor [1 or n, ...] that is repeated to the batch and joined with others of its shape."""

    def __init__(self, cond: Tensor) -> None:
        self.cond = cond

    def process_cond(self, batch_size: int, **_: Any) -> CONDRegular:
        repeats = math.ceil(batch_size / self.cond.shape[0])
        return type(self)(torch.cat([self.cond] * repeats)[:batch_size])

    def can_concat(self, other: CONDRegular) -> bool:
        return self.cond.shape == other.cond.shape

    def concat(self, others: list[CONDRegular]) -> Tensor:
        return torch.cat([self.cond, *(other.cond for other in others)])

    def size(self) -> list[int]:
        return list(self.cond.shape)


def convert_cond(conditioning: list) -> list[dict[str, Any]]:
    """CONDITIONING -> working dictionaries with the model's inputs under `model_conds`."""
    out = []
    for context, options in conditioning:
        model_conds = {**options.get("model_conds", {}), "c_crossattn": CONDRegular(context)}
        model_conds["y"] = CONDRegular(options["pooled_output"])
        out.append({**options, "cross_attn": context, "model_conds": model_conds, "uuid": uuid.uuid4()})
    return out


def resolve_mask_and_area(cond: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """Scale the mask to the latent; `set_area_to_bounds` cuts the work to the mask's bounding box (at least 8 x 8)."""
    cond = dict(cond)
    if "area" in cond and cond["area"][0] == "percentage":
        h, w, y, x = cond["area"][1:]
        cond["area"] = (max(1, round(h * height)), max(1, round(w * width)), round(y * height), round(x * width))
    if "mask" in cond:
        mask = cond["mask"]
        if mask.shape[-2:] != (height, width):
            mask = F.interpolate(mask.unsqueeze(1), size=(height, width), mode="bilinear").squeeze(1)
        if cond.get("set_area_to_bounds"):
            ys, xs = torch.where(mask.abs().amax(dim=0) > 0)
            top, left = (int(ys.min()), int(xs.min())) if len(ys) else (0, 0)
            size = (int(ys.max()) - top + 1, int(xs.max()) - left + 1) if len(ys) else (8, 8)
            cond["area"] = (max(8, size[0]), max(8, size[1]), top, left)
        cond["mask"] = mask
    return cond


def set_time_range(cond: dict[str, Any], percent_to_sigma: Callable[[float], float]) -> dict[str, Any]:
    """Turn `start_percent` / `end_percent` (and a text encoder's own range) into sigmas."""
    start = max(cond.get("start_percent", 0.0), cond.get("clip_start_percent", 0.0))
    end = min(cond.get("end_percent", 1.0), cond.get("clip_end_percent", 1.0))
    has_start = "start_percent" in cond or "clip_start_percent" in cond
    has_end = "end_percent" in cond or "clip_end_percent" in cond
    return {
        **cond,
        **({"timestep_start": percent_to_sigma(start)} if has_start else {}),
        **({"timestep_end": percent_to_sigma(end)} if has_end else {}),
    }


def add_missing_areas(conds: dict[str, list[dict]]) -> None:
    """Give each prompt of one side an opposite one that covers its area, as guidance compares like with like."""
    for side, others in (("positive", "negative"), ("negative", "positive")):
        for cond in [c for c in conds[side] if "area" in c]:
            covering = [c for c in conds[others] if "area" not in c or _inside(cond["area"], c["area"])]
            covering.sort(key=lambda c: math.prod(c["area"][:2]) if "area" in c else math.inf)
            if covering and covering[0].get("area") != cond["area"]:
                conds[others].append({**cond, "model_conds": dict(covering[0]["model_conds"])})


def _inside(inner: tuple, outer: tuple) -> bool:
    (h, w, y, x), (oh, ow, oy, ox) = inner, outer
    return y >= oy and x >= ox and y + h <= oy + oh and x + w <= ox + ow


@dataclass
class CondRow:
    """One prompt's share of a model call: input [n, c, h, w], weight of its output, where it goes."""

    x: Tensor
    mult: Tensor
    model_conds: dict[str, Any]
    area: tuple | None
    hooks: HookGroup | None
    uuid: uuid.UUID
    side: int


def cond_row(cond: dict[str, Any], x: Tensor, sigma: Tensor, side: int) -> CondRow | None:
    """Cut out the prompt's area and weigh it by mask and strength; None outside its time range."""
    if sigma[0] > cond.get("timestep_start", math.inf) or sigma[0] < cond.get("timestep_end", -math.inf):
        return None
    area = cond.get("area")
    if area is not None:
        h, w, y, left = area
        area = (min(h, x.shape[2] - y), min(w, x.shape[3] - left), y, left)
    part = crop(x, area)
    mult = torch.ones_like(part)
    if "mask" in cond:
        mask = crop(cond["mask"][: x.shape[0]].unsqueeze(1), area) * cond.get("mask_strength", 1.0)
        mult = mask.repeat(part.shape[0] // mask.shape[0], part.shape[1], 1, 1)
    mult = mult * cond.get("strength", 1.0)
    if area is not None and "mask" not in cond:
        _feather(mult, area, x.shape)
    model_conds = {k: v.process_cond(batch_size=x.shape[0], area=area) for k, v in cond["model_conds"].items()}
    return CondRow(part, mult, model_conds, area, cond.get("hooks"), cond["uuid"], side)


def crop(x: Tensor, area: tuple | None) -> Tensor:
    return x if area is None else x[:, :, area[2] : area[2] + area[0], area[3] : area[3] + area[1]]


def _feather(mult: Tensor, area: tuple, full: torch.Size) -> None:
    """Fade the last 8 rows and columns towards every edge that lies inside the picture."""
    for dim, (size, start) in enumerate(((area[0], area[2]), (area[1], area[3])), start=2):
        width = min(8, mult.shape[dim] // 4)
        for i in range(width):
            if start != 0:
                mult.narrow(dim, i, 1).mul_((i + 1) / width)
            if size + start < full[dim]:
                mult.narrow(dim, size - 1 - i, 1).mul_((i + 1) / width)
