"""Reading LoRA files: good ones, and all the bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hookline import host
from hookline.errors import HooklineError
from hookline.hooks.lora import LoraMapping, content_digest, layer_name, lora_hook, map_lora, read_lora
from hookline.host import EnumWeightTarget


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    host.add_files("loras", folder)
    return folder


def good() -> dict[str, torch.Tensor]:
    return {"diffusion_model.a.lora_A.weight": torch.ones(2, 4), "diffusion_model.a.lora_B.weight": torch.ones(4, 2)}


def test_reads_tensors_and_name(folder: Path) -> None:
    save_file(good(), folder / "good.safetensors")
    lora = read_lora("good.safetensors")
    assert lora.name == "good.safetensors" and lora.tensors.keys() == good().keys()


def test_unknown_name_suggests_a_close_one(folder: Path) -> None:
    save_file(good(), folder / "portrait.safetensors")
    with pytest.raises(HooklineError, match=r"no file 'portrat.safetensors'; did you mean 'portrait.safetensors'"):
        read_lora("portrat.safetensors")


@pytest.mark.parametrize("name", ["../good.safetensors", "/etc/passwd", "good.safetensors/..", ""])
def test_names_are_never_joined_to_paths(folder: Path, name: str) -> None:
    with pytest.raises(HooklineError, match="no file"):
        read_lora(name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty_file", b""),
        ("html", b"<html><body>Not found</body></html>"),
        ("lying_length", (2**40).to_bytes(8, "little") + b"{}"),
        ("bad_header", (10).to_bytes(8, "little") + b"not json!!"),
        ("pickle", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00"),
    ],
)
def test_unreadable_files_are_named(folder: Path, name: str, content: bytes) -> None:
    (folder / f"{name}.safetensors").write_bytes(content)
    with pytest.raises(HooklineError, match=f"LoRA '{name}.safetensors' can't be read") as caught:
        read_lora(f"{name}.safetensors")
    assert "\n" not in str(caught.value)


def test_truncated_file_is_named(folder: Path) -> None:
    save_file(good(), folder / "whole.safetensors")
    content = (folder / "whole.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(content[:-8])
    with pytest.raises(HooklineError, match="truncated.safetensors"):
        read_lora("truncated.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_is_refused(folder: Path, value: float) -> None:
    tensors = good()
    tensors["diffusion_model.a.lora_A.weight"][1, 2] = value
    save_file(tensors, folder / "broken.safetensors")
    with pytest.raises(HooklineError, match="'diffusion_model.a.lora_A.weight' holds NaN or infinity"):
        read_lora("broken.safetensors")


def test_no_tensors(folder: Path) -> None:
    save_file({}, folder / "nothing.safetensors")
    with pytest.raises(HooklineError, match="holds no tensors"):
        read_lora("nothing.safetensors")


def test_digest_is_of_content() -> None:
    changed = good()
    changed["diffusion_model.a.lora_B.weight"][0, 0] = 2
    renamed = {key.replace(".a.", ".b."): tensor for key, tensor in good().items()}
    half = {key: tensor.half() for key, tensor in good().items()}
    digests = [content_digest(tensors) for tensors in (good(), changed, renamed, half)]
    assert content_digest(dict(reversed(good().items()))) == digests[0]
    assert len(set(digests)) == 4


def test_clone_of_a_hook_knows_its_file(folder: Path) -> None:
    save_file(good(), folder / "good.safetensors")
    group = lora_hook(read_lora("good.safetensors"), 0.5, 0.25)
    copy = group.clone().hooks[0]
    assert copy == group.hooks[0] and copy.lora is group.hooks[0].lora and copy._strength_model == 0.5


def test_mapping_reports_matched_and_unmatched() -> None:
    model = torch.nn.ModuleDict({"diffusion_model": torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4)})})
    tensors = good() | {
        "diffusion_model.gone.lora_A.weight": torch.ones(2, 4),
        "diffusion_model.gone.alpha": torch.ones(()),
    }
    mapping = map_lora(tensors, model, EnumWeightTarget.Model)
    assert (mapping.matched, mapping.total, mapping.unmatched) == (1, 2, ["diffusion_model.gone"])
    assert mapping.patches.keys() == {"diffusion_model.a.weight"}
    assert mapping.summary("x") == "LoRA 'x': 1 of 2 layers matched (LoRA; a 1); not matched: diffusion_model.gone"


@pytest.mark.parametrize(
    "name",
    [
        *("l.lora_A.weight", "l.lora_up.weight", "l.alpha", "l.lora.down.weight", "l_lora.up.weight", "l.diff_b"),
        *("l.hada_w1_a", "l.lokr_w2", "l.lora_B.default.weight", "l.dora_scale", "l.oft_blocks", "l.w_norm"),
    ],
)
def test_layer_names(name: str) -> None:
    assert layer_name(name) == "l"


def test_r104_the_report_counts_the_part_that_was_asked_for() -> None:
    """A LoRA for both: what is for the text encoder is not missing in the diffusion model."""
    model = torch.nn.ModuleDict({"diffusion_model": torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4)})})
    tensors = good() | {f"lora_te_text_model_layer.{part}": torch.ones(2, 2) for part in ("lora_up.weight", "alpha")}
    mapping = map_lora(tensors, model, EnumWeightTarget.Model)
    assert mapping.describe() == "1 of 1 layers matched (LoRA; a 1)"


def test_the_report_names_format_and_groups_and_a_few_of_the_unmatched() -> None:
    patches = {f"diffusion_model.double_blocks.{i}.x.weight": ("diff", (torch.ones(1),)) for i in range(2)}
    patches["diffusion_model.img_in.weight"] = ("set", (torch.ones(1),))
    mapping = LoraMapping(patches, 3, 8, ["a", "b", "c", "d", "e"])
    assert mapping.describe() == (
        "3 of 8 layers matched (difference and replacement; double 2, img_in 1); not matched: a, b, c ..."
    )
