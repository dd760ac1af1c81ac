"""Hooks on a CLIP. Sets are merged, for an encoding has one set and is over in a moment, unless that would round packed
weights again or take much memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import host
from ..hooks.group import weight_hooks
from ..host import EnumWeightTarget, HookGroup
from .model_patcher import apply_hookline

MOST_ENCODINGS = 16
"""Encodings that one CLIP remembers."""


class HookCLIP:
    """The host's CLIP with its encoding replaced; everything else is the host's. Only ever on top of the host's class.

    Strengths follow from the place in the schedule alone; no keyframe object is moved on, so an interrupt leaves
    nothing behind. Encodings are remembered by their text, set and strengths.
    """

    patcher: Any
    remembered: OrderedDict[Hashable, dict[str, Any]]

    def clone(self, *args: Any, **kwargs: Any) -> HookCLIP:
        copy = super().clone(*args, **kwargs)
        copy.__class__ = type(self)
        copy.remembered = OrderedDict()
        return copy

    def encode_from_tokens(self, tokens: Any, return_pooled: bool | str = False, return_dict: bool = False) -> Any:
        """As the host's; with a schedule, the strengths at the start of sampling."""
        out = self._encoding(tokens, return_pooled == "unprojected", 0.0, _content(tokens))
        if return_dict:
            return out
        return (out["cond"], out["pooled_output"]) if return_pooled else out["cond"]

    def encode_from_tokens_scheduled(
        self, tokens: Any, unprojected: bool = False, add_dict: dict[str, Any] | None = None, show_pbar: bool = True
    ) -> list[list[Any]]:
        """Tokens -> CONDITIONING: one entry, or one per strength inside the time range that `add_dict` gives.

        Each text is encoded once per distinct strength; every output of the text encoder is kept.
        """
        add_dict, text = add_dict or {}, _content(tokens)
        if not self.use_clip_schedule:
            entry = {**self._encoding(tokens, unprojected, 0.0, text), **add_dict}
            return [[entry.pop("cond"), entry]]
        ranges = self._ranges(add_dict.get("start_percent", 0.0), add_dict.get("end_percent", 1.0))
        bar = host.ProgressBar(len(ranges)) if show_pbar and len(ranges) > 1 else None
        conditioning = []
        for start, end in ranges:
            entry = self._encoding(tokens, unprojected, start, text)
            entry |= {"clip_start_percent": start, "clip_end_percent": end, **add_dict}
            conditioning.append([entry.pop("cond"), entry])
            if bar is not None:
                bar.update(1)
        return conditioning

    def _ranges(self, start: float, end: float) -> list[tuple[float, float]]:
        """Parts of sampling in which the text encoder's weights stay the same, as far as they touch start .. end."""
        hooks = weight_hooks(self.patcher.forced_hooks)
        starts = {keyframe.start_percent for hook in hooks for keyframe in hook.hook_keyframe.keyframes}
        ranges: list[list[Any]] = []
        for place in sorted({0.0} | {place for place in starts if 0 < place < 1}):
            active = self._active(place)
            if ranges and ranges[-1][2] == active:
                continue
            if ranges:
                ranges[-1][1] = place
            ranges.append([place, 1.0, active])
        return [(a, b) for a, b, _ in ranges if (a < end and b > start) or a <= start == end <= b]

    def _active(self, progress: float) -> list[tuple[Any, float]]:
        """What changes the text encoder at that place in the schedule, by content."""
        with self.patcher.encoding_at(progress):
            return [(known.digest, strength) for known, strength in self.patcher.active(self.patcher.forced_hooks)]

    def _encoding(self, tokens: Any, unprojected: bool, progress: float, text: Hashable) -> dict[str, Any]:
        """The host's encoding as a dictionary, with the strengths of that place in the schedule."""
        layer = getattr(self, "layer_idx", None)
        key = (text, tuple(self._active(progress)), unprojected, layer, self.patcher.patches_uuid)
        if key not in self.remembered:
            pooled = "unprojected" if unprojected else True
            with self.patcher.encoding_at(progress):
                out = super().encode_from_tokens(tokens, return_pooled=pooled, return_dict=True)
            self.remembered[key] = out
            while len(self.remembered) > MOST_ENCODINGS:
                self.remembered.popitem(last=False)
        self.remembered.move_to_end(key)
        return dict(self.remembered[key])


def _content(value: Any) -> Hashable:
    """Equal for tokens with the same content; what can't be compared is equal to nothing."""
    if isinstance(value, dict):
        return tuple((key, _content(part)) for key, part in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_content(part) for part in value)
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return (tuple(value.shape), value.dtype, hashlib.blake2b(data, digest_size=16).digest())
    return value if isinstance(value, (int, float, str, bool, type(None))) else object()


@cache
def _hook_class(base: type) -> type:
    return base if issubclass(base, HookCLIP) else type(f"Hook{base.__name__}", (HookCLIP, base), {})


def hooked_clip(clip: Any, hooks: HookGroup, apply_to_conds: bool, schedule_clip: bool) -> Any:
    """A CLIP that encodes with `hooks`; `apply_to_conds` also puts them on the conditioning it makes.

    Unless `schedule_clip`, the text encoder takes the hooks' own strengths and ignores their keyframes.
    """
    if clip.patcher.is_dynamic():
        clip = clip.clone(disable_dynamic=True)
        # The host's clone loads a second model but goes on encoding with the first.
        clip.cond_stage_model = clip.patcher.model
    else:
        clip = clip.clone()
    clip.__class__ = _hook_class(type(clip))
    clip.remembered = OrderedDict()
    clip.patcher = apply_hookline(clip.patcher, "merged")
    clip.use_clip_schedule = schedule_clip
    if apply_to_conds:
        clip.apply_hooks_to_conds = hooks
    clip.patcher.forced_hooks = hooks.clone()
    if not schedule_clip:
        clip.patcher.forced_hooks.set_keyframes_on_hooks(None)
    clip.patcher.register_all_hook_patches(clip.patcher.forced_hooks, host.create_target_dict(EnumWeightTarget.Clip))
    if clip.patcher.better_unmerged(clip.patcher.forced_hooks):
        clip.patcher.path = "auto"
    return clip
