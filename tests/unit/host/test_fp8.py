"""FP8 matmuls: when they are used, and what they compute. torch has one on the CPU too, which is what runs here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import Tensor

from hookline import quant_formats
from hookline.host.embedded import fp8
from hookline.host.embedded.ops import QuantLinear

OUT, IN = 48, 64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2}


def layer(name: str, shape: tuple[int, int] = (OUT, IN), spec: Any = None, **extra: Tensor) -> QuantLinear:
    random = torch.Generator().manual_seed(0)
    parts, _ = quant_formats.quantize(torch.randn(*shape, generator=random) / 8, name)
    if spec is not None:
        parts["comfy_quant"] = quant_formats.marker({**quant_formats.FORMATS[name].spec, **spec})
    module = QuantLinear(shape[1], shape[0])
    missing, unexpected = module.load_state_dict(
        {**parts, "bias": torch.randn(shape[0], generator=random), **extra}, strict=False
    )
    assert not missing and not unexpected
    return module


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def formula(module: QuantLinear, x: Tensor, scale: float | None = None) -> Tensor:
    """In float64: the input rounded to E4M3 in units of `scale`, cut off at 448 of them, times what the codes mean."""
    if scale is None:
        scale = float(x.float().abs().max()) / 448
    rounded = (x.double() / scale).clamp(-448, 448).to(E4M3).double() * scale
    weight = module.weight._qdata.double() * float(module.weight._params.scale)
    return rounded @ weight.T + module.bias.double()


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The CPU's matmul taken for one in hardware; -> the dtypes of weights that were multiplied by it."""
    seen: list[torch.dtype] = []
    matmul = torch._scaled_mm

    def counted(rows: Tensor, weight: Tensor, **options: Any) -> Tensor:
        seen.append(weight.dtype)
        return matmul(rows, weight, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    monkeypatch.setattr(fp8, "in_hardware", lambda device, storage: True)
    return seen


# In float32 sums and scales round (an E4M3 code on a tie may be its neighbour's). In 16 bits the input is scaled in its
# own dtype first, so that codes near a tie (1 of 16 in bfloat16, of 128 in float16) are the neighbour's, 1/8 away.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@pytest.mark.parametrize("name", list(FP8))
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", [(5, IN), (2, 7, IN), (IN,), (2, 3, 4, IN)])
def test_it_computes_the_formula(hardware: list, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module, x = layer(name), inputs(*shape, dtype=dtype)
    out, expected = module(x), formula(module, x)
    assert hardware == [FP8[name]] and out.dtype == dtype and out.shape == (*shape[:-1], OUT)
    assert (out.double() - expected).norm() / expected.norm() < ROUNDING[dtype]
    # And it is the layer, within the rounding of the input to 3 bits of mantissa.
    floats = x.double() @ module.weight.dequantize().double().T + module.bias.double()
    assert 1e-3 < (out.double() - floats).norm() / floats.norm() < 0.05


def test_a_scale_of_the_checkpoint_for_the_input(hardware: list) -> None:
    """Values beyond 448 of it are cut off, not NaN."""
    module = layer("float8_e4m3fn", input_scale=torch.tensor(1 / 448))
    x = inputs(5, IN)
    assert x.abs().max() > 2
    expected = formula(module, x, 1 / 448)
    assert (module(x).double() - expected).norm() / expected.norm() < ROUNDING[torch.float32]
    assert hardware == [E4M3]


def test_an_input_of_zeros_gives_the_bias(hardware: list) -> None:
    module = layer("float8_e4m3fn")
    assert torch.equal(module(torch.zeros(3, IN)), module.bias.expand(3, OUT)) and hardware


def test_a_layer_without_bias(hardware: list) -> None:
    module, x = layer("float8_e5m2"), inputs(4, IN)
    expected = formula(module, x) - module.bias.double()
    module.bias = None
    assert (module(x).double() - expected).norm() / expected.norm() < ROUNDING[torch.float32]


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (layer("float8_e4m3fn", (OUT, 40)), inputs(3, 40)),
        (layer("float8_e4m3fn", (24, IN)), inputs(3, IN)),
        (layer("float8_e4m3fn"), inputs(0, IN)),
        (layer("float8_e4m3fn"), inputs(3, IN).double()),
        (layer("float8_e4m3fn", spec={"full_precision_matrix_mult": True}), inputs(3, IN)),
        (layer("mxfp8"), inputs(3, IN)),
        (layer("nvfp4"), inputs(3, IN)),
        (layer("int8_rowwise", spec={"full_precision_matrix_mult": True}), inputs(3, IN)),
    ],
    ids=["in_features", "out_features", "no rows", "float64", "asked for", "mxfp8", "nvfp4", "int8 asked for"],
)
def test_computed_in_floats(hardware: list, module: QuantLinear, x: Tensor) -> None:
    weight = module.weight.dequantize()
    assert torch.equal(module(x), torch.nn.functional.linear(x, weight.to(x), module.bias.to(x))) and hardware == []


def test_a_merged_layer_that_is_kept_as_floats(hardware: list) -> None:
    module, x = layer("float8_e4m3fn"), inputs(3, IN)
    weight = module.weight.dequantize()
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert torch.equal(module(x), torch.nn.functional.linear(x, weight, module.bias)) and hardware == []


def test_without_hardware_layers_compute_in_floats() -> None:
    """On the CPU, on a GPU that is not there, and where torch has no such matmul at all."""
    module, x = layer("float8_e4m3fn"), inputs(3, IN)
    assert isinstance(module.weight, QuantizedTensor)
    assert not fp8.in_hardware(torch.device("cpu"), E4M3)
    assert torch.equal(module(x), torch.nn.functional.linear(x, module.weight.dequantize(), module.bias))
    if not torch.cuda.is_available():
        assert not fp8.in_hardware(torch.device("cuda"), E4M3)


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, NotImplementedError])
def test_hardware_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    asked = []

    def refuse(*_: Any, **__: Any) -> Tensor:
        asked.append(1)
        raise error("only supported on CUDA devices with compute capability >= 9.0")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    fp8.in_hardware.cache_clear()
    # A device with all of torch but this matmul.
    device = torch.device("meta")
    assert [fp8.in_hardware(device, E4M3) for _ in range(3)] == [False] * 3 and asked == [1]
    fp8.in_hardware.cache_clear()


def test_the_option_is_read_from_the_entry() -> None:
    spec = json.loads(bytes(quant_formats.marker({"format": "float8_e4m3fn", "full_precision_matrix_mult": True})))
    assert layer("float8_e4m3fn", spec=spec).in_full_precision and not layer("float8_e4m3fn").in_full_precision
