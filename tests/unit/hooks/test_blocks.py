"""Block weights: their text, and which weights they are for."""

from __future__ import annotations

import pytest

from hookline.errors import HooklineError
from hookline.hooks.blocks import PRESETS, block_factors, block_of, parse_block_weights

FLUX = [
    "diffusion_model.img_in.weight",
    *(f"diffusion_model.double_blocks.{i}.img_attn.qkv.weight" for i in range(4)),
    *(f"diffusion_model.single_blocks.{i}.linear1.weight" for i in range(3)),
    "diffusion_model.final_layer.adaLN_modulation.1.weight",
]


def factors(text: str, keys: list[str] = FLUX) -> dict[str, float]:
    found = block_factors(parse_block_weights(text), keys, keys, "Flux")
    return {key.removeprefix("diffusion_model."): factor for key, factor in found.items() if factor != 1}


def test_ranges_names_and_the_last_one_wins() -> None:
    assert factors("double.0-1=0.5, single=0") == {
        "double_blocks.0.img_attn.qkv.weight": 0.5,
        "double_blocks.1.img_attn.qkv.weight": 0.5,
        "single_blocks.0.linear1.weight": 0.0,
        "single_blocks.1.linear1.weight": 0.0,
        "single_blocks.2.linear1.weight": 0.0,
    }
    assert factors("all=0; double_blocks.2 = 1\nsingle=1\nsingle.1=-2") == {
        "img_in.weight": 0.0,
        **{f"double_blocks.{i}.img_attn.qkv.weight": 0.0 for i in (0, 1, 3)},
        "single_blocks.1.linear1.weight": -2.0,
        "final_layer.adaLN_modulation.1.weight": 0.0,
    }
    assert factors("final=0.25, img_in=.5") == {"img_in.weight": 0.5, "final_layer.adaLN_modulation.1.weight": 0.25}


def test_nothing_means_nothing() -> None:
    assert parse_block_weights(" \n ") == () and factors("all=1") == {}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_entries(name: str) -> None:
    assert parse_block_weights(name.upper()) == parse_block_weights(PRESETS[name]) != ()


def test_presets_fit_their_architecture() -> None:
    kept = set(FLUX) - {"diffusion_model." + key for key in factors("flux single only")}
    assert kept == {key for key in FLUX if "single_blocks" in key}
    unet = [f"diffusion_model.{part}.{i}.0.weight" for part in ("input_blocks", "output_blocks") for i in range(3)]
    style = set(unet) - {"diffusion_model." + key for key in factors("sdxl style", unet)}
    assert style == {"diffusion_model.output_blocks.1.0.weight"}


def test_unknown_blocks_are_all_named_with_what_there_is() -> None:
    with pytest.raises(HooklineError) as error:
        factors("double.2-5=0.5, dubble=1, img_in.0=1")
    assert str(error.value) == (
        "block weights: Flux has no double.4, double.5, dubble, img_in.0; it has double.0-3, single.0-2, final, img_in"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("style", "'style' is neither a preset"),
        ("double.0-3", "neither a preset"),
        ("double=1, single", "can't read 'single'"),
        ("double=one", "'one' is not a number"),
        ("double=nan", "'nan' is not a number"),
        ("double.3-1=1", "not a range"),
        ("double.0-99999999=1", "not a range"),
        ("all.3=1", "not a range"),
        ("double..1=1", "can't read"),
    ],
)
def test_errors_name_the_entry(text: str, said: str) -> None:
    with pytest.raises(HooklineError, match=r"^block weights: ") as error:
        parse_block_weights(text)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "block"),
    [
        ("diffusion_model.double_blocks.11.img_mod.lin.weight", ("double_blocks", 11)),
        ("diffusion_model.middle_block.1.proj_in.weight", ("middle_block", 1)),
        ("diffusion_model.final_layer.linear.weight", ("final_layer", None)),
        ("diffusion_model.img_in.weight", ("img_in", None)),
    ],
)
def test_block_of_a_weight(key: str, block: tuple) -> None:
    assert block_of(key) == block
