"""The side path: LoRAs computed beside the layers, so that rows with different LoRAs share one forward.

A *set* holds the factors of all its LoRAs per layer, joined along rank. A *row plan* says for one model call which
rows of the batch use which set, and how strongly. Forward hooks on the layers add the rest. No weight is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import host
from .adapters import (
    FIRST_ONLY,
    Additive,
    Affine,
    InputGain,
    Kronecker,
    LowRank,
    NotAdditive,
    Offset,
    OutputGain,
    Rotation,
    additive,
    scaled,
)
from .rotation import Turning

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}


class RowsDiffer(Exception):
    """A layer was called with other rows than the model: which row belongs to which set is not known."""


class Piece(nn.Module):
    """The low-rank factors of one set for one layer (or a slice of it), all its LoRAs joined along rank.

    `down` [r, in, ...], `up` [out, r]; `ranks[i]` of the r belong to the LoRA and scale in `owners[i]`.
    """

    def __init__(self, parts: list[tuple[int, LowRank]], dtype: torch.dtype) -> None:
        super().__init__()
        first = parts[0][1]
        self.out_slice, self.in_slice = first.out_slice, first.in_slice
        self.owners = tuple((owner, part.scale) for owner, part in parts)
        self.ranks = tuple(part.up.shape[1] for _, part in parts)
        self._columns: tuple[Any, Tensor] | None = None
        self.register_buffer("down", _narrow(torch.cat([part.down for _, part in parts]), dtype))
        self.register_buffer("up", _narrow(torch.cat([part.up for _, part in parts], dim=1), dtype))

    def scale(self, strengths: tuple[float, ...], like: Tensor) -> float | Tensor:
        """Strength times alpha over rank: one number if it is the same for all LoRAs, else one per rank column [r]."""
        values = [strengths[owner] * scale for owner, scale in self.owners]
        if len(set(values)) == 1:
            return values[0]
        key = (tuple(values), like.dtype, like.device)
        if self._columns is None or self._columns[0] != key:
            columns = [value for value, rank in zip(values, self.ranks) for _ in range(rank)]
            # Kept while strengths stay: making it again would wait for the device at every call.
            self._columns = (key, torch.tensor(columns, dtype=like.dtype, device=like.device))
        return self._columns[1]


def _narrow(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors in the compute dtype, but never in a wider one than the file's: casting them at use is cheap."""
    return factor.to(dtype) if factor.element_size() >= dtype.itemsize else factor


class LayerPart(nn.Module):
    """What one set adds to one layer."""

    def __init__(self, parts: list[tuple[int, Additive]], dtype: torch.dtype) -> None:
        super().__init__()
        low_rank: dict[tuple, list[tuple[int, LowRank]]] = {}
        for owner, part in parts:
            if isinstance(part, LowRank):
                low_rank.setdefault((part.out_slice, part.in_slice), []).append((owner, part))
        self.pieces = nn.ModuleList(Piece(pieces, dtype) for pieces in low_rank.values())
        kronecker = [(owner, part) for owner, part in parts if isinstance(part, Kronecker)]
        self.kronecker_scales = [part.scale for _, part in kronecker]
        self.firsts = self._keep("first", [(owner, _narrow(part.first, dtype)) for owner, part in kronecker])
        self.seconds = self._keep("second", [(owner, _narrow(part.second, dtype)) for owner, part in kronecker])
        self.gains = self._keep("gain", [(owner, p.gain) for owner, p in parts if isinstance(p, OutputGain)])
        self.input_gains = self._keep("input_gain", [(owner, p.gain) for owner, p in parts if isinstance(p, InputGain)])
        rotations = [(owner, part) for owner, part in parts if isinstance(part, Rotation)]
        self.turners = [owner for owner, _ in rotations]
        self.turnings = nn.ModuleList(Turning(part) for _, part in rotations)
        self.offsets = self._keep("offset", [(owner, p.vector) for owner, p in parts if isinstance(p, Offset)])
        self.affines = self._keep("affine", [(owner, p.weight) for owner, p in parts if isinstance(p, Affine)])

    def _keep(self, kind: str, vectors: list[tuple[int, Tensor]]) -> list[tuple[int, str]]:
        """Vectors as buffers, so that they move with the module; -> (owner, name of the buffer)."""
        for i, (_, vector) in enumerate(vectors):
            self.register_buffer(f"{kind}{i}", vector)
        return [(owner, f"{kind}{i}") for i, (owner, _) in enumerate(vectors)]

    def scale_input(self, module: nn.Module, x: Tensor, strengths: tuple[float, ...]) -> None:
        """Change the layer's input `x` [rows, ..., in] (channels second in a convolution) in place."""
        shape = (-1, *[1] * (x.dim() - 2)) if _convolution(module) else (-1,)
        for owner, name in self.input_gains:
            x.addcmul_(x, getattr(self, name).to(x).view(shape), value=strengths[owner])

    def add(self, module: nn.Module, x: Tensor, out: Tensor, strengths: tuple[float, ...]) -> None:
        """Add to `out` [rows, ..., out] (channels second in a convolution), given the layer's input `x`, in place."""
        convolution = _convolution(module)
        channel = 1 if convolution else -1

        def across(vector: Tensor) -> Tensor:
            return vector.to(out).view(-1, *[1] * (out.dim() - 2)) if convolution else vector.to(out)

        # Gains act on the layer's own output, so they come before anything is added to it.
        for owner, name in self.gains:
            own = out if module.bias is None else out - across(module.bias)
            out.addcmul_(own, across(getattr(self, name)), value=strengths[owner])
        for owner, turning in zip(self.turners, self.turnings):
            own = out if module.bias is None else out - across(module.bias)
            out.add_(turning.difference(own.movedim(channel, -1), strengths[owner]).movedim(-1, channel))
        for piece in self.pieces:
            part = x if piece.in_slice is None else x.narrow(channel, *piece.in_slice)
            target = out if piece.out_slice is None else out.narrow(channel, *piece.out_slice)
            scale = piece.scale(strengths, out)
            down, up = piece.down.to(x), piece.up.to(out)
            if convolution:
                h = convolution(part, down, stride=module.stride, padding=module.padding, dilation=module.dilation)
                h = h.to(out.dtype) * (scale if isinstance(scale, float) else scale.view(-1, *[1] * (h.dim() - 2)))
                target.add_(convolution(h, up.view(*up.shape, *[1] * (h.dim() - 2))))
            else:
                _add_linear(part, down, up, scale, target)
        for (owner, first), (_, second), scale in zip(self.firsts, self.seconds, self.kronecker_scales):
            product = _kronecker(module, x, getattr(self, first).to(x), getattr(self, second).to(x))
            out.add_(product, alpha=strengths[owner] * scale)
        for owner, name in self.offsets:
            out.add_(across(getattr(self, name)), alpha=strengths[owner])
        for owner, name in self.affines:
            # A norm layer's output is linear in its weight.
            out.add_(_normalized(module, x, getattr(self, name).to(x)), alpha=strengths[owner])


def _kronecker(module: nn.Module, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """kron(first, second) applied to x without making it: the second to each of first's blocks, then first across."""
    blocks = first.shape[1]
    convolution = _convolution(module)
    if convolution is None:
        inner = F.linear(x.unflatten(-1, (blocks, -1)), second)
        return torch.einsum("...bc,ab->...ac", inner, first).flatten(-2)
    parts = x.unflatten(1, (blocks, -1)).flatten(0, 1)
    second = second.view(*second.shape, *[1] * (x.dim() - second.dim()))
    inner = convolution(parts, second, stride=module.stride, padding=module.padding, dilation=module.dilation)
    return torch.einsum("nbc...,ab->nac...", inner.unflatten(0, (-1, blocks)), first).flatten(1, 2)


def _normalized(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, weight, None, module.eps)
    return F.rms_norm(x, weight.shape, weight, module.eps)


def _add_linear(x: Tensor, down: Tensor, up: Tensor, scale: float | Tensor, out: Tensor) -> None:
    h = F.linear(x, down).to(out.dtype)
    alpha = 1.0
    if isinstance(scale, float):
        alpha = scale
    else:
        h = h * scale
    try:
        rows = out.view(-1, out.shape[-1])
    except RuntimeError:
        # A slice of several leading dimensions has no two-dimensional view.
        out.add_(F.linear(h, up), alpha=alpha)
        return
    rows.addmm_(h.reshape(-1, h.shape[-1]), up.t(), alpha=alpha)


class SideSet(nn.Module):
    """All factors of one set on one model."""

    def __init__(self, layers: dict[str, LayerPart], originals: dict[nn.Module, Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers.values())
        self.by_layer = dict(zip(layers, self.parts))
        self._originals = originals

    @property
    def scales_inputs(self) -> bool:
        return any(part.input_gains for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(host.tensor_bytes(buffer) for buffer in self.buffers())

    @property
    def device(self) -> torch.device:
        return next((buffer.device for buffer in self.buffers()), torch.device("cpu"))

    def fits(self) -> bool:
        """False once a base weight that factors were computed from has been replaced; most depend on none."""
        return all(module._parameters.get("weight") is weight for module, weight in self._originals.items())


def build(model: nn.Module, patches: list[dict[str, list[tuple]]], dtype: torch.dtype) -> SideSet:
    """The set of LoRAs given as {weight key: [(factor, patch, strength of the base, offset, function)]} each.

    A factor scales its patch for good (block weights); strengths are for each call to say.

    Raises:
        NotAdditive: some patch has no additive form on its layer; says which and why.
    """
    layers: dict[str, list[tuple[int, Additive]]] = {}
    originals: dict[nn.Module, Any] = {}
    for owner, keyed in enumerate(patches):
        for key, key_patches in keyed.items():
            path, _, name = key.rpartition(".")
            module = model.get_submodule(path)
            _check_layer(module, key)

            def base(module: nn.Module = module) -> Tensor:
                originals[module] = module._parameters["weight"]
                weight = module.weight.to(torch.float32, copy=True)
                convert = getattr(module, "convert_weight", None)
                weight = weight if convert is None else convert(weight, inplace=True)
                # The layer multiplies its input by it, after the point where the side path reads that input.
                smoothing = getattr(module, "pre_quant_scale", None)
                return weight if smoothing is None else weight * smoothing.to(weight)

            for factor, patch, _, offset, function in key_patches:
                before = layers.setdefault(path, [])
                try:
                    forms = additive(patch, name, module._parameters[name].shape, base, offset, function)
                    forms = [scaled(form, factor) for form in forms]
                    if before and any(isinstance(form, FIRST_ONLY) for form in forms):
                        raise NotAdditive("DoRA, OFT or BOFT on top of another LoRA")
                except NotAdditive as reason:
                    raise NotAdditive(f"{key}: {reason}") from None
                before.extend((owner, form) for form in forms)
    return SideSet({path: LayerPart(parts, dtype) for path, parts in layers.items()}, originals)


def _check_layer(module: nn.Module, key: str) -> None:
    weight = getattr(module, "weight", None)
    kind = f"{key}: a {type(module).__name__}"
    if weight is None or isinstance(module, (nn.Embedding, nn.modules.conv._ConvTransposeNd)):
        raise NotAdditive(kind)
    if weight.dim() == 1 and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        raise NotAdditive(kind)
    if weight.dim() > 2 and (
        _convolution(module) is None or module.groups != 1 or module.padding_mode != "zeros" or _is_custom(module)
    ):
        raise NotAdditive(f"{kind} with groups or padding of its own")


def _convolution(module: nn.Module) -> Any:
    return next((function for kind, function in _CONVOLUTIONS.items() if isinstance(module, kind)), None)


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

    @contextmanager
    def hooked(self, model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
        """Forward hooks on these layers."""
        handles = []
        try:
            for path in sorted(paths):
                module = model.get_submodule(path)
                handles.append(module.register_forward_pre_hook(self._before(path)))
                handles.append(module.register_forward_hook(self._hook(path)))
            with host.layers_called():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def calling(self, plan: RowPlan | None) -> Iterator[None]:
        """The plan holds for the model call inside."""
        outer, self.plan = self.plan, plan
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
            x = arguments[0]
            parts = [(rows, part, e.strengths) for rows, part, e in plan.parts(path, x.shape[0]) if part.input_gains]
            if not parts:
                return None
            self._inputs[path] = x
            changed = x.clone()
            for rows, part, strengths in parts:
                part.scale_input(module, changed[rows], strengths)
            return (changed, *arguments[1:])

        return scale

    def _hook(self, path: str) -> Any:
        def add(module: nn.Module, arguments: tuple, out: Tensor) -> Tensor | None:
            plan = self.plan
            if plan is None:
                return None
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
