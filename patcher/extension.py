"""Wrapper, callback and injection registries.

The embedded host is built on these; their names, call types and calling convention are those of ComfyUI's
`comfy.patcher_extension`, so a wrapper written for one host runs on the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Registry = dict[str, dict[str | None, list[Callable]]]
"""call type -> key -> functions in order of registration."""


class WrappersMP:
    """Places of a sampling run that can be wrapped, from the outermost to the innermost."""

    OUTER_SAMPLE = "outer_sample"
    PREPARE_SAMPLING = "prepare_sampling"
    SAMPLER_SAMPLE = "sampler_sample"
    PREDICT_NOISE = "predict_noise"
    CALC_COND_BATCH = "calc_cond_batch"
    APPLY_MODEL = "apply_model"
    DIFFUSION_MODEL = "diffusion_model"


class CallbacksMP:
    """Moments in a patcher's life that can be observed."""

    ON_CLONE = "on_clone"
    ON_LOAD = "on_load_after"
    ON_DETACH = "on_detach_after"
    ON_CLEANUP = "on_cleanup"
    ON_PRE_RUN = "on_pre_run"
    ON_PREPARE_STATE = "on_prepare_state"
    ON_APPLY_HOOKS = "on_apply_hooks"
    ON_REGISTER_ALL_HOOK_PATCHES = "on_register_all_hook_patches"
    ON_INJECT_MODEL = "on_inject_model"
    ON_EJECT_MODEL = "on_eject_model"


@dataclass
class PatcherInjection:
    """Something put into a loaded model (`inject(patcher)`), taken out (`eject(patcher)`) around any change."""

    inject: Callable
    eject: Callable


def add(registry: Registry, call_type: str, key: str | None, function: Callable) -> None:
    registry.setdefault(call_type, {}).setdefault(key, []).append(function)


def get(registry: Registry, call_type: str, key: str | None) -> list[Callable]:
    return registry.get(call_type, {}).get(key, [])


def get_all(registry: Registry, call_type: str) -> list[Callable]:
    return [function for functions in registry.get(call_type, {}).values() for function in functions]


def remove(registry: Registry, call_type: str, key: str | None) -> None:
    registry.get(call_type, {}).pop(key, None)


def copy_registry(registry: Registry) -> Registry:
    return {call_type: {key: list(fs) for key, fs in keyed.items()} for call_type, keyed in registry.items()}


def get_all_wrappers(call_type: str, options: dict[str, Any], is_model_options: bool = False) -> list[Callable]:
    """All wrappers of a type from transformer options (or from the model options that hold them)."""
    if is_model_options:
        options = options.get("transformer_options", {})
    return get_all(options.get("wrappers", {}), call_type)


class WrapperExecutor:
    """Calls `original` through `wrappers`, the first registered outermost.

    A wrapper is `wrapper(executor, *args, **kwargs)` and goes on with `executor(*args, **kwargs)`; `executor.class_obj`
    is the object whose method is wrapped.
    """

    def __init__(self, original: Callable, class_obj: Any, wrappers: list[Callable], idx: int = 0) -> None:
        self.original, self.class_obj, self.wrappers, self.idx = original, class_obj, list(wrappers), idx

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if self.idx == len(self.wrappers):
            return self.original(*args, **kwargs)
        return self.wrappers[self.idx](self, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return WrapperExecutor(self.original, self.class_obj, self.wrappers, self.idx + 1).execute(*args, **kwargs)


def merge_options(into: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge nested options into `into`: dictionaries deeply, lists appended, other values replaced. Returns `into`.

    Nested dictionaries and lists of `into` are replaced by copies, so what others share is not changed.
    """
    for key, value in new.items():
        if isinstance(value, dict):
            into[key] = merge_options(dict(into.get(key, {})), value)
        elif isinstance(value, list):
            into[key] = [*into.get(key, []), *value]
        else:
            into[key] = value
    return into


class Registries:
    """What others have registered on a patcher, each under a key: wrappers, callbacks, injections and more."""

    def __init__(self) -> None:
        self.callbacks: Registry = {}
        self.wrappers: Registry = {}
        self.injections: dict[str, list[PatcherInjection]] = {}
        self.is_injected = False
        self.additional_models: dict[str, list[Any]] = {}
        self.attachments: dict[str, Any] = {}

    def add_wrapper_with_key(self, wrapper_type: str, key: str | None, wrapper: Callable) -> None:
        add(self.wrappers, wrapper_type, key, wrapper)

    def remove_wrappers_with_key(self, wrapper_type: str, key: str | None) -> None:
        remove(self.wrappers, wrapper_type, key)

    def get_wrappers(self, wrapper_type: str, key: str | None) -> list[Callable]:
        return get(self.wrappers, wrapper_type, key)

    def get_all_wrappers(self, wrapper_type: str) -> list[Callable]:
        return get_all(self.wrappers, wrapper_type)

    def add_callback_with_key(self, call_type: str, key: str | None, callback: Callable) -> None:
        add(self.callbacks, call_type, key, callback)

    def remove_callbacks_with_key(self, call_type: str, key: str | None) -> None:
        remove(self.callbacks, call_type, key)

    def get_callbacks(self, call_type: str, key: str | None) -> list[Callable]:
        return get(self.callbacks, call_type, key)

    def get_all_callbacks(self, call_type: str) -> list[Callable]:
        return get_all(self.callbacks, call_type)

    def set_injections(self, key: str, injections: list[PatcherInjection]) -> None:
        self.injections[key] = injections

    def get_injections(self, key: str) -> list[PatcherInjection] | None:
        return self.injections.get(key)

    def remove_injections(self, key: str) -> None:
        self.injections.pop(key, None)

    def inject_model(self) -> None:
        if self.is_injected or not self.injections:
            return
        for injection in [i for injections in self.injections.values() for i in injections]:
            injection.inject(self)
        self.is_injected = True
        for callback in self.get_all_callbacks(CallbacksMP.ON_INJECT_MODEL):
            callback(self)

    def eject_model(self) -> None:
        if not self.is_injected:
            return
        for injection in [i for injections in self.injections.values() for i in injections]:
            injection.eject(self)
        self.is_injected = False
        for callback in self.get_all_callbacks(CallbacksMP.ON_EJECT_MODEL):
            callback(self)

    def set_additional_models(self, key: str, models: list[Any]) -> None:
        self.additional_models[key] = models

    def get_additional_models_with_key(self, key: str) -> list[Any]:
        return self.additional_models.get(key, [])

    def get_additional_models(self) -> list[Any]:
        return [model for models in self.additional_models.values() for model in models]

    def remove_additional_models(self, key: str) -> None:
        self.additional_models.pop(key, None)

    def set_attachments(self, key: str, attachment: Any) -> None:
        self.attachments[key] = attachment

    def get_attachment(self, key: str) -> Any:
        return self.attachments.get(key)

    def remove_attachments(self, key: str) -> None:
        self.attachments.pop(key, None)
