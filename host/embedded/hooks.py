"""Hook types with ComfyUI's interfaces (`comfy.hooks`): data that conditioning carries."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ...patcher.extension import merge_options
from .lora import clip_key_map, load_lora, model_key_map


class EnumHookType(Enum):
    Weight = "weight"
    TransformerOptions = "transformer_options"


class EnumWeightTarget(Enum):
    Model = "model"
    Clip = "clip"


def create_target_dict(target: EnumWeightTarget) -> dict[str, EnumWeightTarget]:
    return {"target": target}


class HookRef:
    """Shared by a hook and its clones: equal hooks have the same ref."""


class HookKeyframe:
    """Strength from `start_percent` (0 first step .. 1 end) on, for at least `guarantee_steps` steps."""

    def __init__(self, strength: float, start_percent: float = 0.0, guarantee_steps: int = 1) -> None:
        self.strength, self.start_percent, self.guarantee_steps = strength, float(start_percent), guarantee_steps
        self.start_t = 999999999.9

    def clone(self) -> HookKeyframe:
        copy = HookKeyframe(self.strength, self.start_percent, self.guarantee_steps)
        copy.start_t = self.start_t
        return copy


class HookKeyframeGroup:
    """Keyframes in order of progress. `strength` is that of the current keyframe, 1 when there is none."""

    def __init__(self) -> None:
        self.keyframes: list[HookKeyframe] = []
        self._current_keyframe: HookKeyframe | None = None

    @property
    def strength(self) -> float:
        return 1.0 if self._current_keyframe is None else self._current_keyframe.strength

    def add(self, keyframe: HookKeyframe) -> None:
        self.keyframes = sorted([*self.keyframes, keyframe], key=lambda k: k.start_percent)
        self.reset()

    def is_empty(self) -> bool:
        return not self.keyframes

    def reset(self) -> None:
        self._current_keyframe = self.keyframes[0] if self.keyframes else None

    def clone(self) -> HookKeyframeGroup:
        copy = HookKeyframeGroup()
        copy.keyframes = [keyframe.clone() for keyframe in self.keyframes]
        copy.reset()
        return copy

    def initialize_timesteps(self, model: Any) -> None:
        """Turn progress into the sigmas of `model`."""
        for keyframe in self.keyframes:
            keyframe.start_t = model.model_sampling.percent_to_sigma(keyframe.start_percent)

    def prepare_current_keyframe(self, curr_t: Any, transformer_options: dict[str, Any]) -> bool:
        """Make the last keyframe that has started at sigma `curr_t` current; True if the strength changed."""
        before = self.strength
        started = [keyframe for keyframe in self.keyframes if keyframe.start_t >= float(curr_t) * (1 - 1e-6)]
        self._current_keyframe = started[-1] if started else self.keyframes[0]
        return self.strength != before


class Hook:
    def __init__(self, hook_type: EnumHookType | None = None) -> None:
        self.hook_type = hook_type
        self.hook_ref = HookRef()
        self.hook_keyframe = HookKeyframeGroup()

    @property
    def strength(self) -> float:
        return self.hook_keyframe.strength

    def initialize_timesteps(self, model: Any) -> None:
        self.hook_keyframe.reset()
        self.hook_keyframe.initialize_timesteps(model)

    def clone(self) -> Hook:
        copy = self.__class__()
        copy.__dict__.update(self.__dict__)
        return copy

    def __eq__(self, other: object) -> bool:
        return self.__class__ is other.__class__ and self.hook_ref is other.hook_ref

    def __hash__(self) -> int:
        return hash(self.hook_ref)


class WeightHook(Hook):
    """Weight changes for the model and the text encoder.

    `weights` is a LoRA's tensors while `need_weight_init`, else {weight key: patch}; `weights_clip` likewise.
    """

    def __init__(self, strength_model: float = 1.0, strength_clip: float = 1.0) -> None:
        super().__init__(EnumHookType.Weight)
        self.weights: dict[str, Any] | None = None
        self.weights_clip: dict[str, Any] | None = None
        self.need_weight_init = True
        self._strength_model, self._strength_clip = strength_model, strength_clip

    def add_hook_patches(
        self, model: Any, model_options: dict[str, Any], target_dict: dict[str, Any], registered: HookGroup
    ) -> bool:
        """Register this hook's patches with a patcher that merges hooks itself."""
        for_clip = target_dict["target"] == EnumWeightTarget.Clip
        patches = self.weights_clip if for_clip else self.weights
        if self.need_weight_init:
            patches = load_lora(self.weights, clip_key_map(model.model) if for_clip else model_key_map(model.model))
        model.add_hook_patches(self, patches or {}, self._strength_clip if for_clip else self._strength_model)
        registered.add(self)
        return True


class TransformerOptionsHook(Hook):
    """Wrappers, callbacks and patches that act only for the conditioning they are on."""

    def __init__(self, transformers_dict: dict[str, Any] | None = None) -> None:
        super().__init__(EnumHookType.TransformerOptions)
        self.transformers_dict = transformers_dict

    def on_apply_hooks(self, model: Any, transformer_options: dict[str, Any]) -> None:
        merge_options(transformer_options, self.transformers_dict or {})


class HookGroup:
    def __init__(self) -> None:
        self.hooks: list[Hook] = []

    def __len__(self) -> int:
        return len(self.hooks)

    def add(self, hook: Hook) -> None:
        if hook not in self.hooks:
            self.hooks.append(hook)

    def contains(self, hook: Hook) -> bool:
        return hook in self.hooks

    def get_type(self, hook_type: EnumHookType) -> list[Hook]:
        return [hook for hook in self.hooks if hook.hook_type == hook_type]

    def clone(self) -> HookGroup:
        return self.clone_and_combine(None)

    def clone_and_combine(self, other: HookGroup | None) -> HookGroup:
        copy = HookGroup()
        for hook in [*self.hooks, *(other.hooks if other else [])]:
            copy.add(hook.clone())
        return copy

    def set_keyframes_on_hooks(self, keyframes: HookKeyframeGroup | None) -> None:
        shared = keyframes.clone() if keyframes is not None else HookKeyframeGroup()
        for hook in self.hooks:
            hook.hook_keyframe = shared
