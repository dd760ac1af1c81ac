"""Float checkpoints to mixed-precision ones in ComfyUI's format, a layer at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import HooklineError
from .quant_formats import FORMATS, MARKER, part_shapes, quantize, refusal

KEEP = "keep"
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}
BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}

Progress = Callable[[int, int, str], None]
"""Called with tensors done, tensors in all, and the layer."""


@dataclass(frozen=True)
class Rule:
    """Layers whose name fits `pattern` (fnmatch) are stored in `format`, or left as they are (`keep`)."""

    pattern: str
    format: str

    @classmethod
    def parse(cls, text: str) -> Rule:
        """`PATTERN=FORMAT`. Raises HooklineError."""
        pattern, equals, name = (part.strip() for part in text.rpartition("="))
        if not (pattern and equals):
            raise HooklineError(f"rule {text!r}: expected PATTERN=FORMAT")
        if name not in FORMATS and name != KEEP:
            raise HooklineError(f"rule {text!r}: no format {name!r}; there are {', '.join([*FORMATS, KEEP])}")
        return cls(pattern, name)


@dataclass
class Tally:
    """What was stored in one format. Sums of squares are over all its weights."""

    layers: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    squares: float = 0.0
    error_squares: float = 0.0

    @property
    def relative_error(self) -> float:
        """|stored - weight| / |weight| (Frobenius)."""
        return math.sqrt(self.error_squares / self.squares) if self.squares else 0.0


@dataclass(frozen=True)
class Summary:
    by_format: dict[str, Tally]
    bytes_before: int
    bytes_after: int

    def lines(self) -> list[str]:
        table = [
            f"{name}: {t.layers} layers, {_size(t.bytes_before)} -> {_size(t.bytes_after)}, "
            f"relative error {t.relative_error:.4f}"
            for name, t in self.by_format.items()
        ]
        saved = self.bytes_before - self.bytes_after
        share = saved / self.bytes_before if self.bytes_before else 0.0
        return [*table, f"file: {_size(self.bytes_before)} -> {_size(self.bytes_after)}, {share:.0%} saved"]


@dataclass(frozen=True)
class _Source:
    """A tensor of the source file, and the format that its layer gets, if any."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    format: str | None

    @property
    def layer(self) -> str:
        return self.key.removesuffix(".weight")


def quantize_file(source: Path, target: Path, rules: Sequence[Rule], progress: Progress = lambda *_: None) -> Summary:
    """Write `source` (safetensors, float) to `target` with the weights that a rule names quantized.

    The first rule that fits a layer's name counts; layers without one are copied. Only one layer is in memory at a
    time. What can be refused is refused before anything is written, and a run that fails leaves no file behind.

    Raises:
        HooklineError: names the file, rule or layer, and the reason.
    """
    try:
        if target.exists() and os.path.samefile(source, target):
            raise HooklineError(f"{target}: is the file to be quantized; write to another one")
        with safe_open(source, framework="pt") as file:
            tensors, metadata = _choose(file, rules, str(source)), file.metadata()
            header, places = _layout(tensors, metadata)
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
            try:
                with open(unfinished, "wb") as out:
                    out.write(header)
                    tallies = _write(file, str(source), tensors, places, len(header), out, progress)
                    size = out.tell()
                os.replace(unfinished, target)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
    except SafetensorError as error:
        raise HooklineError(f"{source}: not a safetensors file: {error}") from error
    except OSError as error:
        raise HooklineError(f"{error.filename or source}: {error.strerror or error}") from error
    return Summary(tallies, source.stat().st_size, size)


def _choose(file: Any, rules: Sequence[Rule], name: str) -> list[_Source]:
    if not rules:
        raise HooklineError(f"{name}: no rule says what to quantize")
    unused, tensors, keys = set(rules), [], list(file.keys())
    for key in keys:
        view = file.get_slice(key)
        dtype, shape = view.get_dtype(), tuple(view.get_shape())
        layer = key.removesuffix(".weight")
        # Vectors are norms' weights, which no format takes; a pattern is not meant for them.
        is_layer = layer != key and len(shape) > 1
        rule = next((r for r in rules if fnmatchcase(layer, r.pattern)), None) if is_layer else None
        chosen = rule.format if rule is not None and rule.format != KEEP else None
        if chosen is not None:
            quantized = f"{layer}.{MARKER}" in keys or f"{layer}.scale_weight" in keys or dtype not in FLOATS
            reason = f"it is quantized already ({dtype})" if quantized else refusal(chosen, shape)
            if reason is not None:
                raise HooklineError(
                    f"{name}: {layer}: can't be {chosen}: {reason}; a rule before it may keep it ({layer}=keep)"
                )
        unused.discard(rule)
        tensors.append(_Source(key, dtype, shape, chosen))
    for rule in rules:
        if rule in unused:
            raise HooklineError(f"rule {rule.pattern}={rule.format}: no layer of {name} is left that it fits")
    return tensors


def _layout(tensors: list[_Source], metadata: dict[str, str] | None) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """-> the file's header and where each tensor's bytes begin and end after it.

    Tensors with large elements come first, as in files of the safetensors library: each is then aligned.
    """
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for t in tensors:
        if t.format is None:
            stored[t.key] = t.dtype, t.shape
        else:
            for part, (dtype, shape) in part_shapes(t.format, t.shape).items():
                stored[f"{t.layer}.{part}"] = DTYPE_NAMES[dtype], shape
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    places, offset = {}, 0
    for key in sorted(stored, key=lambda key: (-BYTES.get(stored[key][0], 1), key)):
        dtype, shape = stored[key]
        end = offset + math.prod(shape) * BYTES.get(dtype, 1)
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        places[key], offset = (offset, end), end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _write(
    file: Any,
    name: str,
    tensors: list[_Source],
    places: dict[str, tuple[int, int]],
    start: int,
    out: BinaryIO,
    progress: Progress,
) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}

    def put(key: str, tensor: Tensor) -> int:
        begin, end = places[key]
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        if data.nbytes != end - begin:
            raise HooklineError(f"{key}: {data.nbytes} bytes where {end - begin} were planned")
        out.seek(start + begin)
        out.write(data)
        return data.nbytes

    for done, t in enumerate(tensors):
        progress(done, len(tensors), t.layer)
        tensor = file.get_tensor(t.key)
        if t.format is None:
            put(t.key, tensor)
            continue
        try:
            parts, meant = quantize(tensor, t.format)
        except HooklineError as error:
            raise HooklineError(f"{name}: {t.layer}: {error}") from error
        tally = tallies.setdefault(t.format, Tally())
        tally.layers += 1
        tally.bytes_before += tensor.numel() * tensor.element_size()
        tally.bytes_after += sum(put(f"{t.layer}.{name}", part) for name, part in parts.items())
        tally.squares += tensor.float().square().sum(dtype=torch.float64).item()
        tally.error_squares += (meant - tensor.float()).square().sum(dtype=torch.float64).item()
    progress(len(tensors), len(tensors), "")
    out.seek(start + max((end for _, end in places.values()), default=0))
    return tallies


def _size(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
