"""ModelPatcher: one model shared by many clones, each with its own patches, wrappers, callbacks and injections.

Interfaces follow ComfyUI's `comfy.model_patcher.ModelPatcher`. Static patches are merged when the patcher is loaded and
the original parameters put back when it is detached. Conditioning hooks are merged the same plain way, one group at a
time: the slow reference that `patcher/` improves on.
"""

from __future__ import annotations

import uuid
from collections import namedtuple
from typing import Any

import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import Tensor, nn

from ...patcher import extension
from ...patcher.extension import CallbacksMP, merge_options
from .hooks import EnumHookType, HookGroup, WeightHook
from .lora import calculate_weight, stochastic_rounding, string_to_seed

CPU = torch.device("cpu")
Backup = namedtuple("Backup", ["weight"])
"""A parameter that something merged stands in for."""


def free_memory(device: torch.device) -> float:
    """Bytes that may be used; this host does not count."""
    return 1e12


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor with every component of a quantized one."""
    if isinstance(tensor, QuantizedTensor):
        return sum(tensor_bytes(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def get_module(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    """Weight key -> (module that owns the parameter, its name there)."""
    path, _, name = key.rpartition(".")
    return model.get_submodule(path), name


class ModelPatcher(extension.Registries):
    def __init__(
        self,
        model: nn.Module,
        load_device: torch.device = CPU,
        offload_device: torch.device = CPU,
        size: int = 0,
        **_: Any,
    ) -> None:
        super().__init__()
        self.model = model
        self.load_device, self.offload_device, self.size = load_device, offload_device, size
        self.patches: dict[str, list[tuple]] = {}
        self.patches_uuid = uuid.uuid4()
        self.backup: dict[str, Backup] = {}
        self.object_patches: dict[str, Any] = {}
        self.object_patches_backup: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.is_clip = False
        self.hook_patches: dict[Any, dict[str, list[tuple]]] = {}
        self.hook_patches_backup: dict[Any, dict[str, list[tuple]]] | None = None
        self.hook_backup: dict[str, Backup] = {}
        self.current_hooks: HookGroup | None = None
        self.forced_hooks: HookGroup | None = None
        self.parent: ModelPatcher | None = None

    # ---- clones

    def clone(self) -> ModelPatcher:
        """A patcher of the same model; what is merged into the model now is shared knowledge of all clones."""
        copy = self.__class__(self.model, self.load_device, self.offload_device, self.size)
        copy.patches = {key: list(patches) for key, patches in self.patches.items()}
        copy.patches_uuid = self.patches_uuid
        copy.object_patches = dict(self.object_patches)
        copy.model_options = merge_options({}, self.model_options)
        copy.attachments = dict(self.attachments)
        copy.additional_models = {key: [m.clone() for m in models] for key, models in self.additional_models.items()}
        copy.callbacks = extension.copy_registry(self.callbacks)
        copy.wrappers = extension.copy_registry(self.wrappers)
        copy.injections = {key: list(injections) for key, injections in self.injections.items()}
        copy.is_injected, copy.is_clip, copy.parent = self.is_injected, self.is_clip, self
        copy.hook_patches = {ref: {k: list(p) for k, p in keyed.items()} for ref, keyed in self.hook_patches.items()}
        copy.forced_hooks = self.forced_hooks.clone() if self.forced_hooks else None
        copy.backup, copy.object_patches_backup = self.backup, self.object_patches_backup
        copy.hook_backup = self.hook_backup
        for callback in self.get_all_callbacks(CallbacksMP.ON_CLONE):
            callback(self, copy)
        return copy

    def is_clone(self, other: Any) -> bool:
        return getattr(other, "model", None) is self.model

    def is_dynamic(self) -> bool:
        return False

    # ---- weights

    def add_patches(
        self, patches: dict[Any, Any], strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        """Merge patches at the next load. Returns the keys that this model has."""
        parameters = dict(self.model.named_parameters())
        added = []
        for patch_key, patch in patches.items():
            key, offset, function = _split_key(patch_key)
            if key in parameters:
                self.patches.setdefault(key, []).append((strength_patch, patch, strength_model, offset, function))
                added.append(patch_key)
        self.patches_uuid = uuid.uuid4()
        return added

    def _merge(self, patches: dict[str, list[tuple]], backup: dict[str, Backup]) -> None:
        merged = []
        for key, key_patches in patches.items():
            module, name = get_module(self.model, key)
            original = module._parameters[name]
            weight = original.to(torch.float32, copy=True)
            if hasattr(module, f"convert_{name}"):
                weight = getattr(module, f"convert_{name}")(weight, inplace=True)
            base = self.backup[key].weight if key in self.backup else original
            weight = calculate_weight(key_patches, weight, key, {key: [(base,)]})
            if hasattr(module, f"set_{name}"):
                weight = getattr(module, f"set_{name}")(weight, seed=string_to_seed(key), return_weight=True)
            else:
                weight = stochastic_rounding(weight, original.dtype, string_to_seed(key))
            merged.append((key, module, name, original, nn.Parameter(weight, requires_grad=False)))
        for key, module, name, original, parameter in merged:
            backup[key] = Backup(original)
            module._parameters[name] = parameter

    def _restore(self, backup: dict[str, Backup]) -> None:
        for key, entry in backup.items():
            module, name = get_module(self.model, key)
            module._parameters[name] = entry.weight
        backup.clear()

    def patch_model(self) -> nn.Module:
        """Put this patcher's patches, object patches and injections into the model."""
        for name, value in self.object_patches.items():
            owner, attribute = get_module(self.model, name)
            self.object_patches_backup.setdefault(name, getattr(owner, attribute))
            setattr(owner, attribute, value)
        self._merge(self.patches, self.backup)
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            callback(self, self.load_device, 0, False, True)
        self.apply_hooks(self.forced_hooks, force_apply=True)
        self.inject_model()
        return self.model

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Take everything out of the model again."""
        self.eject_model()
        self.unpatch_hooks()
        self._restore(self.backup)
        for name, value in self.object_patches_backup.items():
            owner, attribute = get_module(self.model, name)
            setattr(owner, attribute, value)
        self.object_patches_backup.clear()
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return self.model

    def get_model_object(self, name: str) -> Any:
        if name in self.object_patches:
            return self.object_patches[name]
        owner, attribute = get_module(self.model, name)
        return self.object_patches_backup.get(name, getattr(owner, attribute))

    def add_object_patch(self, name: str, value: Any) -> None:
        self.object_patches[name] = value

    def get_free_memory(self, device: torch.device) -> float:
        return free_memory(device)

    # ---- a run

    def pre_run(self) -> None:
        self.model.current_patcher = self
        for callback in self.get_all_callbacks(CallbacksMP.ON_PRE_RUN):
            callback(self)

    def prepare_state(self, timestep: Tensor, model_options: dict[str, Any]) -> None:
        for callback in self.get_all_callbacks(CallbacksMP.ON_PREPARE_STATE):
            callback(self, timestep, model_options)

    def cleanup(self) -> None:
        self.clean_hooks()
        self.model.current_patcher = None
        for callback in self.get_all_callbacks(CallbacksMP.ON_CLEANUP):
            callback(self)

    # ---- conditioning hooks

    def register_all_hook_patches(
        self,
        hooks: HookGroup,
        target_dict: dict,
        model_options: dict | None = None,
        registered: HookGroup | None = None,
    ) -> HookGroup:
        """Make the patches of all weight hooks known; returns the hooks that this model takes."""
        registered = HookGroup() if registered is None else registered
        self.hook_patches_backup = dict(self.hook_patches)
        for hook in hooks.get_type(EnumHookType.Weight):
            hook.add_hook_patches(self, model_options or {}, target_dict, registered)
        return registered

    def add_hook_patches(self, hook: WeightHook, patches: dict[Any, Any], strength_patch: float = 1.0) -> None:
        """Make patches of a hook known, besides those that it has already."""
        keyed = self.hook_patches.setdefault(hook.hook_ref, {})
        for patch_key, patch in patches.items():
            key, offset, function = _split_key(patch_key)
            keyed.setdefault(key, []).append((strength_patch, patch, 1.0, offset, function))

    def restore_hook_patches(self) -> None:
        """Forget hooks registered for the last run."""
        if self.hook_patches_backup is not None:
            self.hook_patches, self.hook_patches_backup = self.hook_patches_backup, None

    def prepare_hook_patches_current_keyframe(
        self, t: Tensor, hook_group: HookGroup, model_options: dict[str, Any]
    ) -> None:
        for hook in hook_group.hooks:
            if not hook.hook_keyframe.is_empty():
                hook.hook_keyframe.prepare_current_keyframe(t[0], model_options.get("transformer_options", {}))
                self.current_hooks = None

    def apply_hooks(
        self, hooks: HookGroup | None, transformer_options: dict | None = None, force_apply: bool = False
    ) -> dict[str, Any]:
        """Merge exactly `hooks` into the weights; returns their transformer options."""
        if hooks is not self.current_hooks or force_apply or hooks is None:
            self.patch_hooks(hooks)
        options = transformer_options or {}
        for hook in hooks.get_type(EnumHookType.TransformerOptions) if hooks and not self.is_clip else ():
            hook.on_apply_hooks(self, options)
        return options

    def patch_hooks(self, hooks: HookGroup | None) -> None:
        self.unpatch_hooks()
        combined: dict[str, list[tuple]] = {}
        for hook in hooks.hooks if hooks else ():
            for key, patches in self.hook_patches.get(hook.hook_ref, {}).items():
                combined.setdefault(key, []).extend((p[0] * hook.strength, *p[1:]) for p in patches)
        self._merge(combined, self.hook_backup)
        self.current_hooks = hooks

    def unpatch_hooks(self) -> None:
        self._restore(self.hook_backup)
        self.current_hooks = None

    def clean_hooks(self) -> None:
        self.unpatch_hooks()


def _split_key(patch_key: Any) -> tuple[str, Any, Any]:
    """Patch key -> (weight key, offset or None, row function or None)."""
    if isinstance(patch_key, str):
        return patch_key, None, None
    return patch_key[0], patch_key[1], patch_key[2] if len(patch_key) > 2 else None
