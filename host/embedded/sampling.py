"""Sampling: conditioning to batches, guidance, Euler steps.

Follows ComfyUI's `comfy.samplers` in what goes into which forward (buckets by hook group, one batch per shape within
memory), so that both hosts give the same picture for the same prompt.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...patcher.extension import WrapperExecutor, WrappersMP, get_all_wrappers, merge_options
from .hooks import EnumWeightTarget, HookGroup, create_target_dict
from .models import load_models
from .patcher import ModelPatcher

SAMPLERS = ("euler",)
SCHEDULERS = ("simple", "normal")


def calculate_sigmas(model_sampling: Any, scheduler: str, steps: int) -> Tensor:
    """Falling sigmas [steps + 1], the last one 0."""
    table = model_sampling.sigmas
    if scheduler == "simple":
        sigmas = [float(table[-(1 + int(i * len(table) / steps))]) for i in range(steps)]
    else:
        sigmas = torch.linspace(float(table[-1]), float(table[0]), steps).tolist()
    return torch.tensor([*sigmas, 0.0])


def prepare_noise(latent: Tensor, seed: int) -> Tensor:
    return torch.randn(latent.shape, dtype=torch.float32, generator=torch.manual_seed(seed))


def fix_empty_latent(model: ModelPatcher, latent: Tensor) -> Tensor:
    """An empty latent [n, any, h, w] gets the model's channels."""
    if latent.count_nonzero():
        return latent
    return latent.new_zeros(latent.shape[0], model.model.latent_channels, *latent.shape[2:])


# ---- conditioning


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
    part = _crop(x, area)
    mult = torch.ones_like(part)
    if "mask" in cond:
        mask = _crop(cond["mask"][: x.shape[0]].unsqueeze(1), area) * cond.get("mask_strength", 1.0)
        mult = mask.repeat(part.shape[0] // mask.shape[0], part.shape[1], 1, 1)
    mult = mult * cond.get("strength", 1.0)
    if area is not None and "mask" not in cond:
        _feather(mult, area, x.shape)
    model_conds = {k: v.process_cond(batch_size=x.shape[0], area=area) for k, v in cond["model_conds"].items()}
    return CondRow(part, mult, model_conds, area, cond.get("hooks"), cond["uuid"], side)


def _crop(x: Tensor, area: tuple | None) -> Tensor:
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


# ---- model calls


def calc_cond_batch(
    model: Any, conds: list[list[dict] | None], x: Tensor, sigma: Tensor, model_options: dict
) -> list[Tensor]:
    """Denoised latents per side: prompts of one hook group and shape share a forward."""
    wrappers = get_all_wrappers(WrappersMP.CALC_COND_BATCH, model_options, is_model_options=True)
    return WrapperExecutor(_calc_cond_batch, None, wrappers).execute(model, conds, x, sigma, model_options)


def _calc_cond_batch(
    model: Any, conds: list[list[dict] | None], x: Tensor, sigma: Tensor, model_options: dict
) -> list[Tensor]:
    patcher = model.current_patcher
    groups: dict[HookGroup | None, list[CondRow]] = {}
    sums = [torch.zeros_like(x) for _ in conds]
    weights = [torch.full_like(x, 1e-37) for _ in conds]

    def add(row: CondRow | None) -> None:
        if row is not None:
            if row.hooks is not None:
                patcher.prepare_hook_patches_current_keyframe(sigma, row.hooks, model_options)
            groups.setdefault(row.hooks, []).append(row)

    for side, side_conds in enumerate(conds):
        for cond in side_conds or ():
            if "default" not in cond:
                add(cond_row(cond, x, sigma, side))
    for side, side_conds in enumerate(conds):
        defaults = [cond for cond in side_conds or () if "default" in cond]
        rest = (
            _left_over(x, [row for rows in groups.values() for row in rows if row.side == side]) if defaults else None
        )
        for cond in defaults:
            row = cond_row(cond, x, sigma, side)
            if row is not None and rest.max() > 0:
                add(replace(row, mult=rest))

    patcher.prepare_state(sigma, model_options)
    for hooks, rows in groups.items():
        while rows:
            batch = _next_batch(model, patcher, rows)
            rows = [row for row in rows if all(row is not other for other in batch)]
            for row, out in zip(batch, _forward(model, patcher, hooks, batch, sigma, model_options)):
                _crop(sums[row.side], row.area).add_(out * row.mult)
                _crop(weights[row.side], row.area).add_(row.mult)
    return [total / weight for total, weight in zip(sums, weights)]


def _left_over(x: Tensor, rows: list[CondRow]) -> Tensor:
    """What the other prompts of a side leave uncovered [n, c, h, w]."""
    rest = torch.ones_like(x)
    for row in rows:
        _crop(rest, row.area).sub_(row.mult)
    return rest.relu_()


def _next_batch(model: Any, patcher: ModelPatcher, rows: list[CondRow]) -> list[CondRow]:
    """The first row and all that can join it, as many as fit into memory (last ones first, like ComfyUI)."""
    first = rows[0]
    fitting = [row for row in rows if _can_join(first, row)][::-1]
    free = patcher.get_free_memory(first.x.device)
    for parts in range(1, len(fitting) + 1):
        batch = fitting[: len(fitting) // parts]
        if model.memory_required([len(batch) * first.x.shape[0], *first.x.shape[1:]]) * 1.5 < free:
            return batch
    return fitting[:1]


def _can_join(a: CondRow, b: CondRow) -> bool:
    return (
        a.x.shape == b.x.shape
        and a.model_conds.keys() == b.model_conds.keys()
        and all(value.can_concat(b.model_conds[key]) for key, value in a.model_conds.items())
    )


def _forward(
    model: Any, patcher: ModelPatcher, hooks: HookGroup | None, rows: list[CondRow], sigma: Tensor, model_options: dict
) -> tuple[Tensor, ...]:
    first = rows[0].model_conds
    inputs = {key: value.concat([row.model_conds[key] for row in rows[1:]]) for key, value in first.items()}
    options = merge_options(patcher.apply_hooks(hooks), model_options.get("transformer_options", {}))
    options |= {"cond_or_uncond": [row.side for row in rows], "uuids": [row.uuid for row in rows], "sigmas": sigma}
    inputs["transformer_options"] = options
    x, t = torch.cat([row.x for row in rows]), torch.cat([sigma] * len(rows))
    wrapper = model_options.get("model_function_wrapper")
    if wrapper is not None:
        out = wrapper(
            model.apply_model, {"input": x, "timestep": t, "c": inputs, "cond_or_uncond": options["cond_or_uncond"]}
        )
    else:
        out = model.apply_model(x, t, **inputs)
    return out.chunk(len(rows))


# ---- a run


class CFGGuider:
    """Classifier-free guidance over one model: positive and negative conditioning, scale `cfg`."""

    def __init__(self, model_patcher: ModelPatcher, positive: list, negative: list, cfg: float) -> None:
        self.model_patcher, self.cfg = model_patcher, cfg
        self.model_options = model_patcher.model_options
        self.original_conds = {"positive": convert_cond(positive), "negative": convert_cond(negative)}

    def predict(self, x: Tensor, sigma: Tensor, model_options: dict) -> Tensor:
        """Denoised latent at sigma [n]."""
        wrappers = get_all_wrappers(WrappersMP.PREDICT_NOISE, self.model_options, is_model_options=True)
        return WrapperExecutor(self._predict, self, wrappers).execute(x, sigma, model_options)

    def _predict(self, x: Tensor, sigma: Tensor, model_options: dict) -> Tensor:
        negative = None if math.isclose(self.cfg, 1.0) else self.conds["negative"]
        cond, uncond = calc_cond_batch(
            self.model_patcher.model, [self.conds["positive"], negative], x, sigma, model_options
        )
        return uncond + (cond - uncond) * self.cfg

    def sample(self, noise: Tensor, latent: Tensor, sigmas: Tensor, callback: Callable | None = None) -> Tensor:
        """Noise and latent [n, c, h, w] -> latent, through the OUTER_SAMPLE wrappers. Hooks are registered first."""
        patcher = self.model_patcher
        self.conds = {side: [dict(cond) for cond in conds] for side, conds in self.original_conds.items()}
        original_options, self.model_options = self.model_options, merge_options({}, self.model_options)
        options = self.model_options["transformer_options"]
        merge_options(options, {"wrappers": patcher.wrappers, "callbacks": patcher.callbacks})
        try:
            hooks = HookGroup()
            for cond in [cond for conds in self.conds.values() for cond in conds]:
                for hook in cond["hooks"].hooks if cond.get("hooks") else ():
                    hooks.add(hook)
            target = create_target_dict(EnumWeightTarget.Model)
            self.model_options["registered_hooks"] = patcher.register_all_hook_patches(
                hooks, target, self.model_options
            )
            executor = WrapperExecutor(self._outer_sample, self, get_all_wrappers(WrappersMP.OUTER_SAMPLE, options))
            return executor.execute(noise, latent, sigmas, callback)
        finally:
            self.model_options = original_options
            patcher.restore_hook_patches()

    def _outer_sample(self, noise: Tensor, latent: Tensor, sigmas: Tensor, callback: Callable | None) -> Tensor:
        patcher, model = self.model_patcher, self.model_patcher.model
        load_models([*patcher.get_additional_models(), patcher])
        patcher.pre_run()
        try:
            if latent.count_nonzero():
                latent = model.process_latent_in(latent)
            self._process_conds(latent.shape[-2], latent.shape[-1])
            model_options = merge_options({}, self.model_options)
            model_options["transformer_options"]["sample_sigmas"] = sigmas
            x = sigmas[0] * noise + (1.0 - sigmas[0]) * latent
            x = euler(lambda x, sigma: self.predict(x, sigma, model_options), x, sigmas, callback)
            return model.process_latent_out(x / (1.0 - sigmas[-1]))
        finally:
            patcher.cleanup()

    def _process_conds(self, height: int, width: int) -> None:
        sampling = self.model_patcher.get_model_object("model_sampling")
        for side, conds in self.conds.items():
            conds = [resolve_mask_and_area(cond, height, width) for cond in conds]
            self.conds[side] = [set_time_range(cond, sampling.percent_to_sigma) for cond in conds]
        add_missing_areas(self.conds)
        for cond in [cond for conds in self.conds.values() for cond in conds]:
            for hook in cond["hooks"].hooks if cond.get("hooks") else ():
                hook.initialize_timesteps(self.model_patcher.model)


def euler(
    denoise: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor, callback: Callable | None = None
) -> Tensor:
    """Euler's method along `sigmas`; `callback(step, denoised, x, total steps)` after each model call."""
    ones = x.new_ones(x.shape[0])
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i] * ones)
        if callback is not None:
            callback(i, denoised, x, len(sigmas) - 1)
        x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
    return x


def sample(
    model: ModelPatcher,
    noise: Tensor,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: list,
    negative: list,
    latent_image: Tensor,
    denoise: float = 1.0,
    seed: int | None = None,
    callback: Callable | None = None,
    start_step: int | None = None,
    last_step: int | None = None,
) -> Tensor:
    """Noise and latent [n, c, h, w] -> latent in the VAE's scale (`comfy.sample.sample`). `seed` serves others."""
    sampling = model.get_model_object("model_sampling")
    total = steps if denoise > 0.9999 else int(steps / denoise)
    sigmas = calculate_sigmas(sampling, scheduler, total)[-(steps + 1) :]
    sigmas = sigmas[start_step or 0 : None if last_step is None else last_step + 1]
    return CFGGuider(model, positive, negative, cfg).sample(noise, latent_image, sigmas, callback)
