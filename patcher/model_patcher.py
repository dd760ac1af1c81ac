"""HookModelPatcher: a ModelPatcher that applies conditioning hooks without writing to a weight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import host
from ..errors import HooklineError
from ..hooks.group import weight_hooks
from ..hooks.keyframes import strength_at, strength_at_progress
from ..hooks.lora import LoraMapping, hook_name, is_for_text_encoder, map_hook, weight_key
from ..host import CallbacksMP, EnumHookType, EnumWeightTarget, HookGroup, PatcherInjection, WeightHook, WrappersMP
from . import sampling
from .compiled import is_compiled, under_their_own_names
from .forms import NotAdditive
from .injection import eject, inject
from .merge import MergedSet, Patch
from .merge import build as build_merged
from .plan import Plan
from .side_path import Entry, RowPlan
from .side_path import build as build_side
from .state import KnownHook, ModelState
from .storage import float_weight

KEY = "hookline"
"""Our key in wrapper, callback and injection registries."""


class HookModelPatcher(host.ModelPatcher):
    """The host's ModelPatcher with its hook path replaced; everything else is the host's."""

    position: tuple[float, list[float]] = (0.0, [])
    """Sigma of the current model call and the sigmas of the run."""
    path: str = "auto"
    """What the user asked for: auto, side_path or merged."""
    progress: float | None = None
    """Where in the schedule a text encoder encodes now; None: where the host has put the keyframes."""
    cache: str = "auto"
    """What the user asked for: where merged sets are kept (`cache.CACHES`)."""
    rounding: str = "stochastic"
    """What the user asked for: how merged weights are rounded (`merge.ROUNDINGS`)."""
    isolated: bool = False
    """One set per forward, since rows could not be told apart in this run."""
    marks_lost: bool = False
    """Nothing says which set a forward uses, so all are merged in this run."""

    @property
    def state(self) -> ModelState:
        return ModelState.of(self.model)

    def set_up(self) -> HookModelPatcher:
        for place, wrapper in (
            (WrappersMP.OUTER_SAMPLE, sampling.outer_sample),
            (WrappersMP.CALC_COND_BATCH, sampling.calc_cond_batch),
            (WrappersMP.APPLY_MODEL, sampling.apply_model),
        ):
            self.remove_wrappers_with_key(place, KEY)
            self.add_wrapper_with_key(place, KEY, wrapper)
        self.remove_callbacks_with_key(CallbacksMP.ON_DETACH, KEY)
        self.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _on_detach)
        self.set_injections(KEY, [PatcherInjection(inject=inject, eject=eject)])
        return self

    def clone(self, *args: Any, **kwargs: Any) -> HookModelPatcher:
        copy = super().clone(*args, **kwargs)
        copy.path, copy.cache, copy.rounding = self.path, self.cache, self.rounding
        if KEY in copy.additional_models:
            # The host clones these too, but a bank belongs to the model and has one patcher.
            copy.additional_models[KEY] = list(self.additional_models[KEY])
        return copy

    # ---- hooks of a run

    def register_all_hook_patches(
        self,
        hooks: HookGroup,
        target_dict: dict[str, Any],
        model_options: dict[str, Any] | None = None,
        registered: HookGroup | None = None,
    ) -> HookGroup:
        """Map the LoRA of every weight hook onto this model.

        Raises:
            HooklineError: nothing in a LoRA fits this model, though it is meant for one like it.
        """
        registered = HookGroup() if registered is None else registered
        for hook in weight_hooks(hooks):
            wanted = getattr(hook, "should_register", None)
            if wanted is None or wanted(self, model_options, target_dict, registered):
                self.known(hook)
                registered.add(hook)
        for callback in self.get_all_callbacks(CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES):
            callback(self, hooks, target_dict, model_options, registered)
        return registered

    def known(self, hook: WeightHook) -> KnownHook:
        known = self.state.known.get(hook.hook_ref)
        if known is None:
            known = KnownHook(hook, self._map(hook))
            self.state.known[hook.hook_ref] = known
            logging.info("Hookline: %s", known.mapping.summary(known.name))
        return known

    def _map(self, hook: WeightHook) -> LoraMapping:
        with under_their_own_names(self.model):
            mapping = map_hook(hook, self.model, EnumWeightTarget.Clip if self.is_clip else EnumWeightTarget.Model)
        meant_for_us = any(not is_for_text_encoder(weight_key(name)) for name in hook.weights or {})
        if not mapping.matched and meant_for_us and not self.is_clip:
            raise HooklineError(f"{mapping.summary(hook_name(hook))}: it is not made for {type(self.model).__name__}")
        return mapping

    def prepare_hook_patches_current_keyframe(
        self, t: Tensor, hook_group: HookGroup, model_options: dict[str, Any]
    ) -> None:
        self.note_position(t, model_options)

    def note_position(self, t: Tensor, model_options: dict[str, Any]) -> None:
        """Where in the run the next model call is, at sigma t [n]; strengths follow from that alone."""
        sigmas = model_options.get("transformer_options", {}).get("sample_sigmas")
        self.position = (float(t[0]), [] if sigmas is None else sigmas.tolist())

    @contextmanager
    def encoding_at(self, progress: float) -> Iterator[None]:
        """While this lasts, a text encoder's hooks have the strengths of that place in the schedule."""
        self.progress = progress
        try:
            yield
        finally:
            self.progress = None

    def strength(self, hook: WeightHook, stepped: bool = True) -> float:
        """The hook's strength now: its own times its keyframes'.

        `stepped`: slopes of a schedule as steps, for what is prepared per strength; else exactly.
        """
        if not self.is_clip:
            return hook._strength_model * strength_at(hook.hook_keyframe, *self.position, stepped=stepped)
        if self.progress is None:
            # A CLIP that is not ours sets the current keyframe itself.
            return hook._strength_clip * float(hook.strength)
        return hook._strength_clip * strength_at_progress(hook.hook_keyframe, self.progress)

    def apply_hooks(
        self, hooks: HookGroup | None, transformer_options: dict[str, Any] | None = None, force_apply: bool = False
    ) -> dict[str, Any]:
        """Prepare the weights of `hooks`; `sampling.apply_model` swaps them in around the model call.

        Returns the hooks' transformer options, the prepared set among them.
        """
        self._undo_stock_hooks()
        options = {} if transformer_options is None else transformer_options
        if hooks is None or self.is_clip:
            return options
        for callback in self.get_all_callbacks(CallbacksMP.ON_APPLY_HOOKS):
            callback(self, hooks)
        for hook in hooks.get_type(EnumHookType.TransformerOptions):
            hook.on_apply_hooks(self, options)
        options[sampling.MERGED_SET] = self.merged_set(hooks)
        return options

    def merged_set(self, hooks: HookGroup | None) -> MergedSet | None:
        """Replacement weights for the group at its present strengths, cached or computed; None if it does nothing."""
        active = self.active(hooks)
        if not active:
            return None
        state = self.state
        # `path` decides how 4-bit weights are stored.
        parts = tuple((known.digest, strength) for known, strength in active)
        key = ("merged", self.path == "auto", self.rounding, self.patches_uuid, parts)
        merged = state.cache.get(key, self._spare_device)
        if merged is None:
            # Weights are computed from base parameters, so none of ours may stand in for one meanwhile.
            with state.journal.swapped_in(None):
                merged = build_merged(self, _by_weight(active))
            state.cache.put(key, merged, merged.device, self._spare_device)
            state.report.weights_computed += len(merged.replacements)
        self._report(active, self.plan(active), len(merged.replacements), merged.bytes)
        return merged

    def encoded(self, encode: Callable[[], Any]) -> Any:
        """What a text encoder's `encode` gives with its hooks: one set for all rows."""
        state, active = self.state, self.active(self.forced_hooks)
        side_set = self.plan(active).side_set if active and self.path != "merged" else None
        if side_set is not None:
            side_set.to(self.load_device)
            plan = RowPlan.of([Entry(side_set, tuple(strength for _, strength in active))])
            with state.layers.hooked(self.model, side_set.by_layer, self._is_compiled()), state.layers.calling(plan):
                out = encode()
            if not plan.missed():
                return out
            self.give_up_layers(plan.missed())
        with state.journal.swapped_in(self.merged_set(self.forced_hooks)):
            return encode()

    def better_unmerged(self, hooks: HookGroup) -> bool:
        """Whether a LoRA's target is not held as plain numbers of 16 bits or more, so that merging would round it
        again, or a copy of all targets would take more than half of the free memory."""
        keys = {weight_key(key) for hook in weight_hooks(hooks) for key in self.known(hook).mapping.patches}
        weights = [self.model.get_parameter(key) for key in keys]
        if any(isinstance(weight, host.QuantizedTensor) or weight.element_size() == 1 for weight in weights):
            return True
        return sum(host.tensor_bytes(weight) for weight in weights) > host.free_memory(self.load_device) / 2

    def active(self, hooks: HookGroup | None, stepped: bool = True) -> list[tuple[KnownHook, float]]:
        """The LoRAs of a group that do something on this model now, with their strengths."""
        found = [(self.known(hook), self.strength(hook, stepped)) for hook in weight_hooks(hooks)]
        return [(known, strength) for known, strength in found if strength != 0 and known.mapping.patches]

    @property
    def _spare_device(self) -> torch.device | None:
        return self.offload_device if self.cache in ("auto", "ram") else None

    def end_run(self) -> None:
        """Whatever happened, base weights are in place; prepared sets go where the user wants them kept."""
        state = self.state
        state.journal.restore()
        if self.cache == "ram":
            state.cache.rest(self.offload_device)
        elif self.cache == "off":
            state.unload()
        state.report.bytes_cached = state.cache.bytes

    def _report(self, active: list[tuple[KnownHook, float]], plan: Plan, layers: int, size: int) -> None:
        report = self.state.report
        for known, _ in active:
            report.loras[known.name] = known.mapping.describe()
        key = (plan.path, *((known.digest, strength) for known, strength in active))
        report.group(key, [(known.name, strength) for known, strength in active], plan, layers, size)

    # ---- the side path

    @contextmanager
    def running(self, conds: dict[str, list[dict[str, Any]]]) -> Iterator[None]:
        """A run with this conditioning: the layers that side paths act on are hooked meanwhile."""
        state = self.state
        self.isolated = self.marks_lost = False
        state.begin_run()
        groups = {id(c["hooks"]): c["hooks"] for side in conds.values() for c in side if c.get("hooks") is not None}
        known = [[self.known(hook) for hook in weight_hooks(group)] for group in groups.values()]
        if not any(known):
            state.report.note("no conditioning of this run carries hooks, so there was nothing to do")
        plans = [self.plan([(k, 1.0) for k in group if k.mapping.patches]) for group in known]
        self._load_with_model([plan.side_set for plan in plans if plan.side_set is not None])
        paths = {weight_key(key).rpartition(".")[0] for group in known for k in group for key in k.mapping.patches}
        with state.layers.hooked(self.model, set() if self.path == "merged" else paths, self._is_compiled()):
            yield

    def _load_with_model(self, sets: list[nn.Module]) -> None:
        """Have the host load these sets together with the model."""
        state = self.state
        if not sets:
            # A bank that an earlier run has left here may not be what the host can copy to several GPUs.
            self.remove_additional_models(KEY)
            return
        if state.bank_patcher is None:
            state.bank_patcher = host.ModelPatcher(state.bank, self.load_device, self.offload_device)
        if list(state.bank.sets) != sets:
            # The host takes a loaded model to be loaded whole: what is new would stay on the other device.
            state.bank_patcher.detach()
            state.bank_patcher.size = 0
            state.bank.sets = nn.ModuleList(sets)
        self.set_additional_models(KEY, [state.bank_patcher])

    def plan(self, active: list[tuple[KnownHook, float]]) -> Plan:
        """The path of these LoRAs together, whatever their strengths."""
        state = self.state
        key = (self.path, *(known.digest for known, _ in active))
        if key not in state.plans:
            state.plans[key] = self._make_plan(active)
        return state.plans[key]

    def _make_plan(self, active: list[tuple[KnownHook, float]]) -> Plan:
        if self.path == "merged":
            return Plan(None, "asked for")
        if not active:
            return Plan(None, "nothing to do")
        if self.get_additional_models_with_key("multigpu"):
            return self._must_merge("the model runs on several GPUs")
        if self.marks_lost:
            return self._must_merge("a wrapper around the model does not pass on which row uses which set")
        state = self.state
        patches = [_by_weight([(known, 1.0)]) for known, _ in active]
        missed = sorted({key.rpartition(".")[0] for keyed in patches for key in keyed} & state.unreachable)
        if missed:
            return self._must_merge(f"the model never calls {', '.join(missed[:3])}{' ...' if missed[3:] else ''}")
        key = ("side path", *(known.digest for known, _ in active))
        side_set = state.cache.get(key) or state.cache.get((self.patches_uuid, *key))
        if side_set is None:
            try:
                side_set = build_side(self.model, patches, self._compute_dtype(), self._base_weight)
            except NotAdditive as reason:
                return self._must_merge(str(reason))
            key = (self.patches_uuid, *key) if side_set.depends_on_weights else key
            state.cache.put(key, side_set, self.load_device)
        return Plan(side_set, "added beside the layers, no weight is touched")

    def _base_weight(self, module: nn.Module, key: str) -> Tensor:
        """The weight without hooks in float32, whether or not the loader has merged its own patches by now."""
        name = key.rpartition(".")[2]
        current = module._parameters[name]
        weight = self.backup[key].weight.to(current.device) if key in self.backup else current
        return host.calculate_weight(self.patches.get(key, []), float_weight(module, name, weight), key)

    def _is_compiled(self) -> bool:
        wrapped = "torch.compile" in self.wrappers.get(WrappersMP.APPLY_MODEL, {})
        return wrapped or is_compiled(self.model, self.object_patches)

    def _must_merge(self, reason: str) -> Plan:
        if self.path == "side_path" or self.is_dynamic():
            raise HooklineError(f"these hooks can't take the side path: {reason}")
        return Plan(None, reason)

    def _compute_dtype(self) -> torch.dtype:
        model_dtype = getattr(self.model, "get_dtype_inference", None)
        return model_dtype() if model_dtype else torch.float32

    def entry(self, hooks: HookGroup | None) -> tuple[int, bool]:
        """-> the number of the group's entry at its present strengths, and whether the side path takes its LoRAs."""
        active = self.active(hooks, stepped=False)
        if not active:
            return 0, hooks is not None
        plan = self.plan(active)
        if plan.side_set is None:
            return 0, False
        state = self.state
        key = (plan.side_set, tuple(strength for _, strength in active))
        if key not in state.numbers:
            state.numbers[key] = len(state.entries)
            state.entries.append(Entry(*key))
            self._report(active, plan, len(plan.side_set.by_layer), plan.side_set.bytes)
        return state.numbers[key], True

    def other_hooks(self, hooks: HookGroup) -> HookGroup | None:
        """The group without its weight hooks; None when nothing is left."""
        others = HookGroup()
        for hook in hooks.hooks:
            if hook.hook_type != EnumHookType.Weight:
                others.add(hook)
        return others if len(others) else None

    def isolate(self, reason: str) -> None:
        """From now on in this run one set per forward: always right, but not batched."""
        if not self.isolated:
            self.isolated = True
            self.state.report.note(f"one forward per set of hooks: {reason}")

    def give_up_layers(self, paths: set[str]) -> None:
        """These layers are not reached by forward hooks; what acts on them is merged from now on.

        Raises:
            HooklineError: this was known already, and they were to be reached all the same.
        """
        if paths <= self.state.unreachable:
            raise HooklineError(f"the model does not call {', '.join(sorted(paths))}, which hooks act on")
        self.state.unreachable |= paths
        self.state.plans = {}
        self.state.report.groups = {}
        self.state.report.note(f"not reached by the side path: {', '.join(sorted(paths))}")

    def give_up_marks(self) -> None:
        """Rows come without the numbers of their sets; all sets are merged for the rest of this run."""
        self.marks_lost = True
        self.state.plans = {}
        self.state.report.groups = {}
        self.state.report.note("merged: a wrapper around the model does not pass on which row uses which set")

    # ---- what the host's own hook path would do

    def patch_hooks(self, hooks: HookGroup | None) -> None:
        """Nothing to write: sets are swapped in around a model call or an encoding, and out after it."""
        self._undo_stock_hooks()

    def _undo_stock_hooks(self) -> None:
        """The host leaves hooks in a text encoder's weights until another clone of its patcher is loaded."""
        if self.hook_backup:
            super().unpatch_hooks()

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        self.state.journal.restore()
        self._undo_stock_hooks()

    def clean_hooks(self) -> None:
        """Called by the host after every run, which is no reason to forget prepared sets."""
        self.state.journal.restore()

    def get_non_dynamic_delegate(self) -> HookModelPatcher:
        """Asked for by ComfyUI whenever conditioning has hooks. The side path needs no second model."""
        if self.path != "merged":
            return self
        return apply_hookline(super().get_non_dynamic_delegate(), self.path, self.cache, self.rounding)


def described(model: host.ModelPatcher, hooks: HookGroup) -> tuple[list[str], str]:
    """-> names of the weight hooks of a group, and the path they would take on `model`."""
    found = weight_hooks(hooks)
    names = [hook_name(hook) for hook in found]
    if not isinstance(model, HookModelPatcher):
        return names, "ComfyUI's own path (no Apply Hookline)"
    known = [(model.known(hook), 1.0) for hook in found]
    return names, model.plan([(k, strength) for k, strength in known if k.mapping.patches]).path


def _by_weight(active: list[tuple[KnownHook, float]]) -> dict[str, list[Patch]]:
    """Weight key -> patches of all active hooks, in the hooks' order."""
    patches: dict[str, list[Patch]] = {}
    for known, strength in active:
        for key, patch in known.mapping.patches.items():
            offset, function = (None, None) if isinstance(key, str) else (key[1], key[2] if len(key) > 2 else None)
            scaled = strength * known.mapping.factor(key)
            if isinstance(patch, tuple) and patch[0] == "set" and scaled != 1:
                # A replacement knows no strength; the difference to it does.
                patch = ("model_as_lora", patch[1])
            patches.setdefault(weight_key(key), []).append((scaled, patch, 1.0, offset, function))
    return patches


def _on_detach(patcher: HookModelPatcher, unpatch_all: bool) -> None:
    if unpatch_all:
        patcher.state.unload()


# ---- making one


@cache
def _hook_class(base: type) -> type:
    """`base`, whichever patcher class the model's loader chose, with Hookline's methods on top."""
    if issubclass(base, HookModelPatcher):
        return base
    if base is host.ModelPatcher:
        return HookModelPatcher
    return type(f"Hook{base.__name__}", (HookModelPatcher, base), {})


def apply_hookline(
    model: host.ModelPatcher, path: str = "auto", cache: str = "auto", rounding: str = "stochastic"
) -> HookModelPatcher:
    """The MODEL as a HookModelPatcher: same model object, same patches, same loader behaviour.

    `path` is one of `plan.PATHS`: "side_path" refuses what can't go there, "merged" never uses it.
    `cache` is one of `cache.CACHES`, `rounding` one of `merge.ROUNDINGS`.
    """
    patcher = model.clone()
    # The host's clone() builds an object of the patcher's own class; ours has the same fields and only adds methods.
    patcher.__class__ = _hook_class(type(patcher))
    patcher.path, patcher.cache, patcher.rounding = path, cache, rounding
    return patcher.set_up()
