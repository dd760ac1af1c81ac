"""The quantization formats of ComfyUI checkpoints: what is stored per layer, and how to get it from a float weight.

A quantized layer holds `<layer>.weight` (codes), its scales beside it, and an entry that names its format: a
`<layer>.comfy_quant` tensor of JSON text, or the same JSON in the file header's `_quantization_metadata`.
Needs no host. The maths is comfy-kitchen's, through its layout classes and not through its registry of names:
ComfyUI registers classes of its own there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy_kitchen.tensor import (
    AsymW4A8Int8Layout,
    QuantizedLayout,
    TensorCoreConvRotW4A4Layout,
    TensorCoreFP8Layout,
    TensorCoreMXFP8Layout,
    TensorCoreNVFP4Layout,
    TensorWiseINT8Layout,
)
from torch import Tensor

from .errors import HooklineError

CONVROT_GROUP = 256
MARKER = "comfy_quant"
HEADER = "_quantization_metadata"

F32, E4M3, E5M2 = torch.float32, torch.float8_e4m3fn, torch.float8_e5m2

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """One format. `spec` is the layer's entry in a checkpoint; `options` is what the layout's `quantize` takes."""

    layout: type[QuantizedLayout]
    layout_name: str
    storage: torch.dtype
    spec: dict[str, Any]
    scales: dict[str, str]
    """Name in the checkpoint -> field of the layout's Params."""
    options: dict[str, Any] = field(default_factory=dict)
    group: int = 1
    """in_features must be a multiple of it."""
    computes_quantized: bool = True
    """Whether matmuls with such weights run on any device; FP8 and FP4 ones need hardware."""


def _fp8(dtype: torch.dtype, name: str) -> Format:
    options = {"scale": "recalculate", "dtype": dtype}
    scales = {"weight_scale": "scale"}
    return Format(
        TensorCoreFP8Layout, "TensorCoreFP8Layout", dtype, {"format": name}, scales, options, computes_quantized=False
    )


def _int8(spec: dict[str, Any], group: int = 1, **options: Any) -> Format:
    spec, scales = {"format": "int8_tensorwise", **spec}, {"weight_scale": "scale"}
    return Format(TensorWiseINT8Layout, "TensorWiseINT8Layout", torch.int8, spec, scales, options, group)


FORMATS: dict[str, Format] = {
    "float8_e4m3fn": _fp8(E4M3, "float8_e4m3fn"),
    "float8_e5m2": _fp8(E5M2, "float8_e5m2"),
    "int8_tensorwise": _int8({}, scale="recalculate"),
    "int8_rowwise": _int8({}, per_channel=True),
    "int8_convrot": _int8(
        {"convrot": True, "convrot_groupsize": CONVROT_GROUP},
        CONVROT_GROUP,
        per_channel=True,
        convrot=True,
        convrot_groupsize=CONVROT_GROUP,
    ),
    "mxfp8": Format(
        TensorCoreMXFP8Layout,
        "TensorCoreMXFP8Layout",
        E4M3,
        {"format": "mxfp8"},
        {"weight_scale": "scale"},
        computes_quantized=False,
    ),
    "nvfp4": Format(
        TensorCoreNVFP4Layout,
        "TensorCoreNVFP4Layout",
        torch.uint8,
        {"format": "nvfp4"},
        {"weight_scale": "block_scale", "weight_scale_2": "scale"},
        computes_quantized=False,
    ),
    "convrot_w4a4": Format(
        TensorCoreConvRotW4A4Layout,
        "TensorCoreConvRotW4A4Layout",
        torch.int8,
        {"format": "convrot_w4a4", "convrot_groupsize": CONVROT_GROUP},
        {"weight_scale": "scale"},
        {"convrot_groupsize": CONVROT_GROUP},
        CONVROT_GROUP,
    ),
    "asym_w4a8_int8": Format(
        AsymW4A8Int8Layout,
        "AsymW4A8Int8Layout",
        torch.int8,
        {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": CONVROT_GROUP},
        {"weight_s_rel": "scale", "weight_s_channel": "s_channel", "weight_codebook": "codebook"},
        {"group_size": 16, "convrot_groupsize": CONVROT_GROUP},
        CONVROT_GROUP,
    ),
}
"""By the name that rules use. The three INT8 kinds are one format, `int8_tensorwise`, in a checkpoint: ComfyUI tells
them apart by the scale's shape ([] or [out, 1]) and the entry's `convrot`."""

OPTIONAL_PARTS = {"weight_codebook"}
EXTRA_PARTS = ("input_scale", "pre_quant_scale")
"""Tensors that any layer may have beside its weight: a fixed scale [] for quantizing the input, and factors [in] that
the layer multiplies its input by (AWQ smoothing), so that it computes `weight * pre_quant_scale`."""


# ---- what a checkpoint says


def marker(spec: dict[str, Any]) -> Tensor:
    """The `comfy_quant` tensor of an entry: uint8, UTF-8 JSON."""
    return torch.tensor(list(json.dumps(spec).encode()), dtype=torch.uint8)


def read_marker(tensor: Tensor, layer: str) -> dict[str, Any]:
    """Raises HooklineError naming the layer if it is not an entry of a format known here."""
    try:
        spec = json.loads(bytes(tensor.tolist()))
        name = spec["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise HooklineError(f"{layer}: its {MARKER} entry names no quantization format") from error
    format_of(spec, layer)
    # ComfyUI takes options from the entry itself or from a "params" in it.
    params = spec.get("params")
    return {**(params if isinstance(params, dict) else {}), **spec, "format": name}


def format_of(spec: dict[str, Any], layer: str) -> Format:
    """The format that an entry names. Raises HooklineError naming the layer for an unknown one."""
    found = next((f for f in FORMATS.values() if f.spec["format"] == spec["format"]), None)
    if found is None:
        raise HooklineError(f"{layer}: quantization format {spec['format']!r} is not known here")
    return found


def with_markers(tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> dict[str, Tensor]:
    """The tensors, with the layer table of the file's header (`_quantization_metadata`) as `comfy_quant` entries.

    Raises:
        HooklineError: the table can't be read, or names a layer without a weight.
    """
    if not metadata or HEADER not in metadata:
        return tensors
    try:
        layers = dict(json.loads(metadata[HEADER])["layers"])
    except (ValueError, KeyError, TypeError) as error:
        raise HooklineError(f"the checkpoint's {HEADER} is not a table of layers") from error
    for layer in layers:
        if f"{layer}.weight" not in tensors:
            raise HooklineError(f"{layer}: listed in the checkpoint's {HEADER}, but there is no such weight")
    return {**tensors, **{f"{layer}.{MARKER}": marker(spec) for layer, spec in layers.items()}}


# ---- from a float weight


def refusal(name: str, shape: Shape) -> str | None:
    """Why a weight of this shape can't be stored in format `name`; None if it can."""
    if len(shape) != 2:
        return f"it takes matrices [out, in], not {list(shape)}"
    if shape[1] % FORMATS[name].group:
        return f"in_features {shape[1]} is not a multiple of {FORMATS[name].group}"
    return None


def part_shapes(name: str, shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
    """What `quantize` gives for a weight of this shape [out, in], without computing it."""

    def up(n: int, multiple: int) -> int:
        return -(-n // multiple) * multiple

    rows, columns = shape
    if name in ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise"):
        parts = {"weight": (FORMATS[name].storage, shape), "weight_scale": (F32, ())}
    elif name in ("int8_rowwise", "int8_convrot"):
        parts = {"weight": (torch.int8, shape), "weight_scale": (F32, (rows, 1))}
    elif name == "mxfp8":
        rows, columns = up(rows, 32), up(columns, 32)
        scale = (up(rows, 128), up(columns // 32, 4))
        parts = {"weight": (E4M3, (rows, columns)), "weight_scale": (torch.uint8, scale)}
    elif name == "nvfp4":
        rows, columns = up(rows, 16), up(columns, 16)
        scale = (up(rows, 128), up(columns // 16, 4))
        parts = {
            "weight": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (E4M3, scale),
            "weight_scale_2": (F32, ()),
        }
    elif name == "convrot_w4a4":
        parts = {"weight": (torch.int8, (rows, columns // 2)), "weight_scale": (F32, (rows,))}
    else:
        parts = {
            "weight": (torch.int8, (rows, columns // 2)),
            "weight_s_rel": (E4M3, (rows, columns // 16)),
            "weight_s_channel": (F32, (rows,)),
            "weight_codebook": (F32, (16,)),
        }
    return {**parts, MARKER: (torch.uint8, (len(marker(FORMATS[name].spec)),))}


def quantize(weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Float weight [out, in] -> what a checkpoint holds after `<layer>.`, and the float32 weight that this means.

    Rounds to nearest. Raises HooklineError (without the layer's name) for a shape that the format can't take, and for
    infinities and NaN.
    """
    reason = refusal(name, tuple(weight.shape))
    if reason is None and not torch.isfinite(weight).all():
        reason = "it holds infinities or NaN"
    if reason is not None:
        raise HooklineError(f"can't be {name}: {reason}")
    chosen = FORMATS[name]
    weight = weight.float()
    # A weight of zeros has no largest value to scale by.
    options = chosen.options if weight.any() else {**chosen.options, "scale": torch.ones(())}
    codes, params = chosen.layout.quantize(weight, **options)
    parts = {
        f"weight{suffix}": part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part
        for suffix, part in chosen.layout.state_dict_tensors(codes, params).items()
    }
    meant = chosen.layout.dequantize(codes, params)[: weight.shape[0], : weight.shape[1]]
    return {**parts, MARKER: marker(chosen.spec)}, meant
