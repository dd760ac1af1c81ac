"""Writing quantized checkpoints: by command and by node, read back by the host."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_quantized import float_tensors
from torch import Tensor

from hookline import host, quant_formats
from hookline.cli import main
from hookline.errors import HooklineError
from hookline.host.embedded.models import make_model as embedded_model
from hookline.quant_formats import FORMATS
from hookline.quantize import Rule, quantize_file

# Gaussian weights; what comfy-kitchen's rounding to nearest loses, measured apart from this code.
RELATIVE_ERROR = {
    "float8_e4m3fn": 0.0267,
    "float8_e5m2": 0.0528,
    "int8_tensorwise": 0.0115,
    "int8_rowwise": 0.0085,
    "int8_convrot": 0.0087,
    "mxfp8": 0.0265,
    "nvfp4": 0.0951,
    "convrot_w4a4": 0.1425,
    "asym_w4a8_int8": 0.0729,
}


def source(folder: Path, **more: Tensor) -> Path:
    random = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(300, 512, generator=random).to(torch.bfloat16),
        "a.bias": torch.randn(301, generator=random).to(torch.bfloat16),
        "b.weight": torch.randn(64, 96, generator=random),
        "norm.weight": torch.ones(5, dtype=torch.float16),
        **more,
    }
    save_file(tensors, folder / "in.safetensors", metadata={"who": "me"})
    return folder / "in.safetensors"


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format(lab: Any, tmp_path: Path, name: str) -> None:
    given, out = source(tmp_path), tmp_path / "out.safetensors"
    seen = []
    rules = [Rule("b", "keep"), Rule("*", name)]
    summary = quantize_file(given, out, rules, lambda done, total, layer: seen.append((done, total)))
    before, after = load_file(given), load_file(out)
    assert json.loads(bytes(after["a.comfy_quant"].tolist())) == FORMATS[name].spec
    assert all(lab.raw(after[key]) == lab.raw(before[key]) for key in before if key != "a.weight")
    parts, meant = quant_formats.quantize(before["a.weight"], name)
    assert all(lab.raw(after[f"a.{part}"]) == lab.raw(tensor) for part, tensor in parts.items())
    tally = summary.by_format[name]
    weight = before["a.weight"].double()
    assert tally.relative_error == pytest.approx(float((meant - weight).norm() / weight.norm()), rel=1e-5)
    # The table is of rows twice as long: their largest value, which sets the scale, is larger.
    assert tally.relative_error == pytest.approx(RELATIVE_ERROR[name], rel=0.25)
    assert (tally.layers, tally.bytes_before) == (1, 300 * 512 * 2)
    assert (summary.bytes_before, summary.bytes_after) == (given.stat().st_size, out.stat().st_size)
    assert seen[-1] == (4, 4)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"who": "me"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]


def test_zeros_stay_zeros() -> None:
    for name in FORMATS:
        assert not quant_formats.quantize(torch.zeros(32, 256), name)[1].any(), name


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["b=convrot_w4a4"], "b: can't be convrot_w4a4: in_features 96 is not a multiple of 256"),
        (["*=nvfp4"], "conv: can't be nvfp4: it takes matrices"),
        (["done=mxfp8"], "done: can't be mxfp8: it is quantized already"),
        (["a=nvfp4", "nothing=nvfp4"], "rule nothing=nvfp4: no layer"),
        (["bad=nvfp4"], "in.safetensors: bad: can't be nvfp4: it holds infinities or NaN"),
        ([], "no rule"),
    ],
)
def test_refused_and_nothing_written(tmp_path: Path, rules: list[str], message: str) -> None:
    more = {
        "conv.weight": torch.ones(2, 2, 3, 3),
        "done.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "bad.weight": torch.full((16, 16), float("nan")),
    }
    given, out = source(tmp_path, **more), tmp_path / "out.safetensors"
    with pytest.raises(HooklineError) as raised:
        quantize_file(given, out, [Rule.parse(text) for text in rules])
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_that_turns_up_while_it_streams(tmp_path: Path, value: float) -> None:
    """Layers before it are written by then. Nothing of that stays, and a file of that name is still the old one."""
    bad = torch.ones(16, 32, dtype=torch.bfloat16)
    bad[3, 4] = value
    given, out, done = source(tmp_path, **{"z.weight": bad}), tmp_path / "out.safetensors", []
    out.write_bytes(b"old")
    with pytest.raises(HooklineError) as raised:
        rules = [Rule(name, "float8_e4m3fn") for name in ("a", "b", "z")]
        quantize_file(given, out, rules, lambda number, total, layer: done.append(layer))
    assert str(raised.value) == f"{given}: z: can't be float8_e4m3fn: it holds infinities or NaN"
    assert {"a", "b"} < set(done)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]
    assert out.read_bytes() == b"old"


@pytest.mark.parametrize("text", ["nvfp4", "=nvfp4", "*=int3", ""])
def test_bad_rules(text: str) -> None:
    with pytest.raises(HooklineError, match="rule"):
        Rule.parse(text)


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    given = source(tmp_path)
    content = given.read_bytes()
    (tmp_path / "soft.safetensors").symlink_to(given)
    os.link(given, tmp_path / "hard.safetensors")
    for name in ("in", "soft", "hard"):
        with pytest.raises(HooklineError, match="is the file to be quantized"):
            quantize_file(given, tmp_path / f"{name}.safetensors", [Rule("a", "nvfp4")])
    assert given.read_bytes() == content


def test_an_interrupted_run_leaves_no_file_and_the_old_one(tmp_path: Path) -> None:
    given, out = source(tmp_path), tmp_path / "out.safetensors"
    out.write_bytes(b"old")

    def interrupt(done: int, total: int, layer: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_file(given, out, [Rule("a", "nvfp4")], interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]
    assert out.read_bytes() == b"old"


@pytest.mark.parametrize("given", ["missing.safetensors", "text.safetensors"])
def test_command_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: Any, given: str) -> None:
    (tmp_path / "text.safetensors").write_text("hello")
    assert main(["quantize", str(tmp_path / given), str(tmp_path / "out"), "--rule", "*=nvfp4"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hookline: ")]
    assert given in line and not (tmp_path / "out").exists()


def forward(model: Any) -> Tensor:
    random = torch.Generator().manual_seed(0)
    x, context, y = (torch.randn(*shape, generator=random) for shape in ((2, 16, 8, 8), (2, 2, 64), (2, 32)))
    return model.model.diffusion_model(x, torch.tensor([0.3, 0.8]), context, y)


def test_node_writes_what_the_host_loads_by_name(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed formats in one file; loaded from disk in ComfyUI, and the same forward as the embedded host's."""
    models, outputs = tmp_path / "models", tmp_path / "outputs"
    models.mkdir(), outputs.mkdir()
    save_file(lab.model_tensors(), models / "hookline_test_float.safetensors")
    host.add_files("diffusion_models", models)
    if lab.name == "comfyui":
        import folder_paths

        monkeypatch.setattr(folder_paths, "get_output_directory", lambda: str(outputs))
    else:
        monkeypatch.setattr("hookline.host.embedded.files.output_folders", [outputs])
    rules = "# the widest first\n*_mlp.2=convrot_w4a4\n*attn.qkv=nvfp4\n\n*blocks.*=mxfp8"
    inputs = {"model_name": "hookline_test_float.safetensors", "rules": rules, "filename_prefix": "small"}
    (summary,) = lab.node("HooklineQuantizeCheckpoint", **inputs)
    (path,) = outputs.iterdir()
    assert summary.startswith(str(path)) and path.name == "small_00001_.safetensors"
    assert "nvfp4: 4 layers" in summary and "convrot_w4a4: 4 layers" in summary and "saved" in summary
    if lab.name == "comfyui":
        import comfy.sd

        model = comfy.sd.load_diffusion_model(str(path))
    else:
        model = host.make_model(load_file(path))
    expected = forward(embedded_model(load_file(path)))
    # 4-bit activations: an ulp before rounding can be a whole step after it.
    assert (forward(model) - expected).norm() / expected.norm() < 0.05
    with pytest.raises(HooklineError):
        lab.node("HooklineQuantizeCheckpoint", **{**inputs, "filename_prefix": "../escaped"})
    with pytest.raises(HooklineError):
        lab.node("HooklineQuantizeCheckpoint", **{**inputs, "model_name": "../escaped"})


# ComfyUI and the embedded host compute the same codes; but where inputs are rounded too, an ulp before that can be a
# whole step after it (1/127 of the largest value, 1/7 in 4 bits).
FORWARD = dict.fromkeys(FORMATS, 1e-4) | dict.fromkeys(
    ("int8_tensorwise", "int8_rowwise", "int8_convrot", "asym_w4a8_int8"), 0.01
)
FORWARD["convrot_w4a4"] = 0.05


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_host_loads_every_format_from_the_file(tmp_path: Path, name: str) -> None:
    """In ComfyUI by `load_diffusion_model`: the embedded host's forward, and but for rounding the float model's."""
    save_file(float_tensors(), tmp_path / "float.safetensors")
    file = tmp_path / "small.safetensors"
    quantize_file(tmp_path / "float.safetensors", file, [Rule("*blocks.*", name)])
    if host.name == "comfyui":
        import comfy.sd

        model = comfy.sd.load_diffusion_model(str(file))
    else:
        with safe_open(file, "pt") as opened:
            model = host.make_model(load_file(file), opened.metadata())
    weights = [m.weight for n, m in model.model.named_modules() if "blocks." in n and hasattr(m, "in_features")]
    assert len(weights) == 13 and all(isinstance(weight, host.QuantizedTensor) for weight in weights)
    out, expected = forward(model), forward(embedded_model(load_file(file)))
    assert (out - expected).norm() / expected.norm() < FORWARD[name]
    floats = forward(embedded_model(float_tensors()))
    # Through two blocks with residuals, about the rounding of one layer's weights; twice that where inputs round too.
    assert 0 < (out - floats).norm() / floats.norm() < 2 * RELATIVE_ERROR[name] + 0.02
