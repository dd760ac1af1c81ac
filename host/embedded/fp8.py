"""FP8 matmuls: where the hardware has them, both operands stay in 8 bits."""

from __future__ import annotations

from functools import cache

import comfy_kitchen
import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@cache
def in_hardware(device: torch.device, storage: torch.dtype) -> bool:
    """Whether weights of an FP8 dtype can be multiplied on `device` by E4M3 inputs, faster than as floats.

    Asks by doing it once: which cards, drivers and versions of torch can is nothing to keep a list of.
    """
    if device.type == "cpu":
        # torch has such a matmul there, which is no faster than floats.
        return False
    try:
        one = torch.ones(16, 16, device=device)
        return bool((_matmul(one.to(E4M3), one.to(storage), one[0, 0], one[0, 0], torch.bfloat16) == 16).all())
    except (RuntimeError, AssertionError, AttributeError, TypeError, NotImplementedError):
        return False


def takes(x: Tensor, weight: QuantizedTensor) -> bool:
    """Whether x [..., in] and the weight have sizes and dtypes that FP8 matmuls take."""
    floats = x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return floats and x.numel() > 0 and all(size % 16 == 0 for size in weight.shape)


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
    """x [..., in], FP8 weight [out, in] -> [..., out] in x's dtype.

    The input is rounded to E4M3, whatever the weight is in (no hardware multiplies E5M2 by E5M2): in units of
    `input_scale` [], beyond which it is cut off, or else so that its largest value fits.
    """
    rows = x.reshape(-1, x.shape[-1])
    scale = input_scale
    if scale is None:
        # An input of zeros has no largest value to scale by.
        scale = (rows.abs().amax().float() / torch.finfo(E4M3).max).clamp(min=torch.finfo(torch.float32).tiny)
    codes = comfy_kitchen.quantize_per_tensor_fp8(rows, scale.float(), E4M3)
    out = _matmul(codes, weight._qdata, scale.float(), weight._params.scale, x.dtype)
    if bias is not None:
        # Beside the matmul, which takes a bias for some output dtypes only.
        out = out + bias.to(out.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _matmul(rows: Tensor, weight: Tensor, row_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(rows.contiguous(), weight.t(), scale_a=row_scale, scale_b=weight_scale, out_dtype=dtype)
