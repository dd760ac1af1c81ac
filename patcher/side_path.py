"""The side path: LoRAs computed beside the layers, so that rows with different LoRAs share one forward.

A *set* holds the factors of all its LoRAs per layer, joined along rank. A *row plan* says for one model call which
rows of the batch use which set, and how strongly. Forward hooks on the layers add the rest. No weight is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import host
from .adapters import additive
from .compiled import Site, change_inputs, overridden
from .factors import convolution_of
from .forms import Additive, InputGain, NotAdditive, OnTop, Rotation, scaled
from .layer_part import LayerPart
from .storage import float_weight, gguf_type


class RowsDiffer(Exception):
    """A layer was called with other rows than the model: which row belongs to which set is not known."""


class SideSet(nn.Module):
    """All factors of one set on one model."""

    def __init__(self, layers: dict[str, LayerPart], originals: dict[nn.Module, Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers.values())
        self.by_layer = dict(zip(layers, self.parts))
        self._originals = originals

    @property
    def scales_inputs(self) -> bool:
        return any(part.scales_input for part in self.parts)

    @property
    def depends_on_weights(self) -> bool:
        return bool(self._originals)

    @property
    def bytes(self) -> int:
        return sum(host.tensor_bytes(buffer) for buffer in self.buffers())

    @property
    def device(self) -> torch.device:
        return next((buffer.device for buffer in self.buffers()), torch.device("cpu"))

    def fits(self) -> bool:
        """False once a base weight that factors were computed from has been replaced; most depend on none."""
        return all(module._parameters.get("weight") is weight for module, weight in self._originals.items())


class _Dependent(Exception):
    """A patch's form depends on the weight."""


def build(
    model: nn.Module,
    patches: list[dict[str, list[tuple]]],
    dtype: torch.dtype,
    base: Callable[[nn.Module, str], Tensor] = lambda module, key: float_weight(module, "weight", module.weight),
) -> SideSet:
    """The set of LoRAs given as {weight key: [(factor, patch, strength of the base, offset, function)]} each.

    A factor scales its patch for good (block weights); strengths are for each call to say. `base(module, key)` is the
    weight without hooks in float32, for patches whose form depends on it.

    Raises:
        NotAdditive: some patch has no additive form on its layer; says which and why.
    """
    layers: dict[str, list[tuple[int, Additive | OnTop]]] = {}
    originals: dict[nn.Module, Any] = {}
    merges: dict[str, list[tuple]] = {}
    for owner, keyed in enumerate(patches):
        for key, key_patches in keyed.items():
            path = key.rpartition(".")[0]
            module = model.get_submodule(path)
            _check_layer(module, key)
            for factor, patch, _, offset, function in key_patches:
                before = merges.setdefault(key, [])
                try:
                    forms = _forms(module, key, base, list(before), (factor, patch, offset, function), originals)
                except NotAdditive as reason:
                    raise NotAdditive(f"{key}: {reason}") from None
                layers.setdefault(path, []).extend((owner, form) for form in forms)
                before.append((owner, factor, patch, offset, function))
    return SideSet({path: LayerPart(parts, dtype) for path, parts in layers.items()}, originals)


def _forms(
    module: nn.Module,
    key: str,
    base: Callable[[nn.Module, str], Tensor],
    before: list[tuple],
    patch: tuple,
    originals: dict[nn.Module, Any],
) -> list[Additive | OnTop]:
    """The forms of one patch (factor, patch, offset, function) after those `before` it on the same weight."""
    factor, adapter, offset, function = patch
    name = key.rpartition(".")[2]
    shape = module._parameters[name].shape

    def forms(weight: Callable[[], Tensor]) -> list[Additive]:
        found = [scaled(form, factor) for form in additive(adapter, name, shape, weight, offset, function)]
        turns = any(isinstance(form, Rotation) for form in found)
        if isinstance(module, nn.Embedding) and (turns or offset is not None or function is not None):
            raise NotAdditive("OFT or BOFT, a slice or a row function on an embedding")
        return found

    def dependent() -> Tensor:
        raise _Dependent

    try:
        return forms(dependent)
    except _Dependent:
        originals[module] = module._parameters[name]
    if gguf_type(originals[module]) is not None:
        raise NotAdditive("it depends on the base weight, which is packed")
    if not before:
        return forms(lambda: base(module, key))

    def on_top(strengths: tuple[float, ...]) -> list[Additive]:
        earlier = [(f * strengths[owner], p, 1.0, place, rows) for owner, f, p, place, rows in before]
        return forms(lambda: host.calculate_weight(earlier, base(module, key), key))

    owners = tuple(owner for owner, *_ in before)
    tried = on_top((1.0,) * (1 + max(owners)))
    return [OnTop(on_top, owners, any(isinstance(form, InputGain) for form in tried))]


def _check_layer(module: nn.Module, key: str) -> None:
    weight = getattr(module, "weight", None)
    kind = f"{key}: a {type(module).__name__}"
    if weight is None or isinstance(module, nn.modules.conv._ConvTransposeNd):
        raise NotAdditive(kind)
    if weight.dim() == 1 and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        raise NotAdditive(kind)
    if weight.dim() > 2 and (
        convolution_of(module) is None or module.groups != 1 or module.padding_mode != "zeros" or _is_custom(module)
    ):
        raise NotAdditive(f"{kind} with groups or padding of its own")


def _is_custom(module: nn.Module) -> bool:
    """A convolution with arguments of its own (causal padding, say) does not do what its attributes say."""
    return not isinstance(module.padding, tuple) or hasattr(module, "time_causal_padding")


# ---- one model call


@dataclass(frozen=True)
class Entry:
    """A set and the strengths of its LoRAs at one moment; `set` None adds nothing."""

    set: SideSet | None
    strengths: tuple[float, ...] = ()


@dataclass
class RowPlan:
    """Which rows use which entry: consecutive (start, stop, entry) with a set. `rows` counts all."""

    rows: int
    segments: list[tuple[int, int, Entry]]
    scales_inputs: bool = False
    reached: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    """Layers about to be called: what scales inputs can act there."""

    @classmethod
    def of(cls, entries: list[Entry]) -> RowPlan:
        segments: list[tuple[int, int, Entry]] = []
        for row, entry in enumerate(entries):
            if segments and segments[-1][1] == row and segments[-1][2] is entry:
                segments[-1] = (segments[-1][0], row + 1, entry)
            elif entry.set is not None:
                segments.append((row, row + 1, entry))
        scales_inputs = any(entry.set.scales_inputs for _, _, entry in segments)
        return cls(len(entries), segments, scales_inputs)

    @property
    def uniform(self) -> bool:
        """All rows use the same entry, so it does not matter which row is which."""
        return len(self.segments) == 1 and self.segments[0][:2] == (0, self.rows)

    def parts(self, path: str, rows: int) -> list[tuple[slice, LayerPart, Entry]]:
        """What acts on which of a layer's `rows`.

        Raises:
            RowsDiffer: they are not the model's rows, and it matters which is which.
        """
        if not self.uniform and rows != self.rows:
            raise RowsDiffer(f"{path}: {rows} rows in a model call of {self.rows}")
        found = [(start, stop, entry.set.by_layer.get(path), entry) for start, stop, entry in self.segments]
        return [
            (slice(None) if self.uniform else slice(start, stop), part, entry)
            for start, stop, part, entry in found
            if part is not None
        ]

    def missed(self) -> set[str]:
        """Layers that should have been called and were not."""
        return {path for _, _, entry in self.segments for path in entry.set.by_layer} - self.reached


class Layers:
    """The forward hooks on one model, and the row plan of the call that is running."""

    def __init__(self) -> None:
        self.plan: RowPlan | None = None
        self._inputs: dict[str, Tensor] = {}
        """Original inputs of layers that are being called with changed ones."""
        self._overridden: list[Site] = []
        """In a run of a compiled model: its layers that sets act on."""

    @contextmanager
    def hooked(self, model: nn.Module, paths: Iterable[str], compiled: bool = False) -> Iterator[None]:
        """Forward hooks on these layers; in a `compiled` model what stands in for them."""
        sites = [Site(model.get_submodule(path), self._before(path), self._hook(path)) for path in sorted(paths)]
        with ExitStack() as stack:
            if compiled and sites:
                stack.enter_context(overridden(model, sites))
                stack.callback(setattr, self, "_overridden", self._overridden)
                self._overridden = sites
            for site in () if compiled else sites:
                stack.callback(site.module.register_forward_pre_hook(site.before).remove)
                stack.callback(site.module.register_forward_hook(site.after).remove)
            stack.enter_context(host.layers_called())
            yield

    @contextmanager
    def calling(self, plan: RowPlan | None) -> Iterator[None]:
        """The plan holds for the model call inside."""
        outer, self.plan = self.plan, plan
        if plan is not None and plan.scales_inputs:
            change_inputs(self._overridden)
        try:
            yield
        finally:
            self.plan = outer
            self._inputs.clear()

    def _before(self, path: str) -> Any:
        def scale(module: nn.Module, arguments: tuple) -> tuple | None:
            plan = self.plan
            if plan is None or not plan.scales_inputs:
                return None
            plan.asked.add(path)
            x = arguments[0]
            parts = [(rows, part, e.strengths) for rows, part, e in plan.parts(path, x.shape[0]) if part.scales_input]
            if not parts:
                return None
            self._inputs[path] = x
            changed = x.clone()
            for rows, part, strengths in parts:
                changed[rows] = part.inputs(module, x[rows], strengths)[0][1]
            return (changed, *arguments[1:])

        return scale

    def _hook(self, path: str) -> Any:
        def add(module: nn.Module, arguments: tuple, out: Tensor) -> Tensor | None:
            plan = self.plan
            if plan is None:
                return None
            if plan.scales_inputs and path not in plan.asked:
                # Compiled without asking, and torch was told not to look again.
                return None
            if path in plan.reached and not plan.uniform:
                raise RowsDiffer(f"{path} is called more than once in a model call")
            plan.reached.add(path)
            x = self._inputs.pop(path, arguments[0])
            for rows, part, entry in plan.parts(path, out.shape[0]):
                part.add(module, x[rows], out[rows], entry.strengths)
            return out

        return add


class Rows:
    """Which entry each batch row uses, as the host batches it with the model's other inputs (`comfy.conds`).

    Integers in a tensor [rows]: whatever repeats or cuts tensors along rows carries it along.
    """

    def __init__(self, cond: Tensor, batched: bool) -> None:
        self.cond, self.batched = cond, batched

    def process_cond(self, batch_size: int, **_: Any) -> Rows:
        return Rows(self.cond.repeat(batch_size)[:batch_size], self.batched)

    def can_concat(self, other: Rows) -> bool:
        return self.batched or bool(self.cond[0] == other.cond[0])

    def concat(self, others: list[Rows]) -> Tensor:
        return torch.cat([self.cond, *(other.cond for other in others)])

    def size(self) -> list[int]:
        return list(self.cond.shape)

    def _copy_with(self, cond: Tensor) -> Rows:
        # ComfyUI's context windows copy conditions by this name.
        return Rows(cond, self.batched)


class Bank(nn.Module):
    """The sets in use on one model, as a module that the host's memory manager can count, load and unload."""

    def __init__(self) -> None:
        super().__init__()
        self.device = None
        self.sets = nn.ModuleList()
