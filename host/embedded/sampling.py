"""Sampling: batches, guidance, Euler steps.

Follows ComfyUI's `comfy.samplers` in what goes into which forward (buckets by hook group, one batch per shape within
memory), so that both hosts give the same picture for the same prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...patcher.extension import WrapperExecutor, WrappersMP, get_all_wrappers, merge_options
from .conditioning import (
    CondRow,
    add_missing_areas,
    cond_row,
    convert_cond,
    crop,
    resolve_mask_and_area,
    set_time_range,
)
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
                crop(sums[row.side], row.area).add_(out * row.mult)
                crop(weights[row.side], row.area).add_(row.mult)
    return [total / weight for total, weight in zip(sums, weights)]


def _left_over(x: Tensor, rows: list[CondRow]) -> Tensor:
    """What the other prompts of a side leave uncovered [n, c, h, w]."""
    rest = torch.ones_like(x)
    for row in rows:
        crop(rest, row.area).sub_(row.mult)
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
