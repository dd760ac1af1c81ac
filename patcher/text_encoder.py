"""Hooks on a CLIP. Its sets are merged: an encoding has one set, and it is over in a moment."""

from __future__ import annotations

from typing import Any

from .. import host
from ..host import EnumWeightTarget, HookGroup
from .model_patcher import apply_hookline


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
    clip.patcher = apply_hookline(clip.patcher, "merged")
    clip.use_clip_schedule = schedule_clip
    if apply_to_conds:
        clip.apply_hooks_to_conds = hooks
    clip.patcher.forced_hooks = hooks.clone()
    if not schedule_clip:
        clip.patcher.forced_hooks.set_keyframes_on_hooks(None)
    clip.patcher.register_all_hook_patches(clip.patcher.forced_hooks, host.create_target_dict(EnumWeightTarget.Clip))
    return clip
