"""What others do to a batch: attention couple, tiling, wrappers. Right on the side path too; the report says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_architectures import ARCHITECTURES, group, lora, make
from torch import Tensor

from hookline import host
from hookline.errors import HooklineError
from hookline.hooks.conditioning import set_props
from hookline.patcher.model_patcher import apply_hookline

SIZE = (8, 16)


def conds(lab: Any) -> tuple[list, list]:
    """Two regions with a LoRA each, and a third set on the negative side: three rows that all differ."""
    masks = torch.zeros(2, 1, *SIZE)
    masks[0, ..., :8], masks[1, ..., 8:] = 1, 1
    hooks = lab.hooks(lab.inverted), lab.hooks(lab.slanted, 0.7)
    positive = [c for i in (0, 1) for c in lab.cond(i, mask=masks[i], hooks=hooks[i])]
    return positive, lab.cond(50, hooks=lab.hooks(lab.slanted, -0.5))


def tiles_of(x: Tensor) -> list[Tensor]:
    """The left and the right half."""
    return list(x.chunk(2, dim=-1))


def stacked(call: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
    """Both tiles along the batch dimension, in one call: `call(tiles, how many times the rows)`."""
    return torch.cat(call(torch.cat(tiles_of(x)), 2).chunk(2), dim=-1)


def in_turn(call: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
    return torch.cat([call(tile, 1) for tile in tiles_of(x)], dim=-1)


def tile_function(stack: bool, keeps: tuple[str, ...] | None = None) -> Callable:
    """A `model_function_wrapper`; with `keeps`, one that passes on nothing else."""

    def tiled(apply: Callable, p: dict[str, Any]) -> Tensor:
        inputs = {key: value for key, value in p["c"].items() if keeps is None or key in keeps}

        def call(x: Tensor, times: int) -> Tensor:
            repeated = {k: torch.cat([v] * times) if isinstance(v, Tensor) else v for k, v in inputs.items()}
            return apply(x, torch.cat([p["timestep"]] * times), **repeated)

        return (stacked if stack else in_turn)(call, p["input"])

    return tiled


def repeated(value: Any, rows: int, times: int) -> Any:
    return torch.cat([value] * times) if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value


def tile_wrapper(executor: Callable, x: Tensor, *args: Any, how: Callable, **kwargs: Any) -> Tensor:
    """An APPLY_MODEL or DIFFUSION_MODEL wrapper."""
    n = len(x)

    def call(tiles: Tensor, times: int) -> Tensor:
        more = [repeated(a, n, times) for a in args], {k: repeated(v, n, times) for k, v in kwargs.items()}
        return executor(tiles, *more[0], **more[1])

    return how(call, x)


def pairs_of_rows(executor: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tiles of two rows at a time, stacked: as many rows as the whole batch has, but other ones."""
    out = []
    for i in range(0, len(x), 2):
        rows = [a[i : i + 2] if isinstance(a, Tensor) and len(a) == len(x) else a for a in args]
        named = {
            k: v[i : i + 2] if isinstance(v, Tensor) and len(v) == len(x) and k != "hookline_rows" else v
            for k, v in kwargs.items()
        }

        def call(tiles: Tensor, times: int, rows: list = rows, named: dict = named) -> Tensor:
            n = len(tiles) // times
            marks = named.get("hookline_rows")
            more = {k: repeated(v, n, times) for k, v in named.items()} | (
                {} if marks is None else {"hookline_rows": marks}
            )
            return executor(tiles, *[repeated(a, n, times) for a in rows], **more)

        out.append(stacked(call, x[i : i + 2]))
    return torch.cat(out)


def compare(lab: Any, change: Callable[[Any], None], sides: tuple[list, list], path: str = "auto") -> Any:
    """-> the patcher after a run, whose result is that of the merged path with the same change."""
    model = lab.model()
    change(model)
    expected = lab.sample(apply_hookline(model, "merged"), *sides, size=SIZE, steps=2)
    hooked = apply_hookline(model, path)
    out = lab.sample(hooked, *sides, size=SIZE, steps=2)
    # float32 sums of the same products in another order, relative to the largest value of a latent
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    untouched = lab.sample(apply_hookline(lab.model(), "merged"), *sides, size=SIZE, steps=2)
    assert (expected - untouched).abs().max() > 1e-3 * untouched.abs().max(), "this changes nothing"
    return hooked


@pytest.mark.parametrize("stack", [True, False])
def test_tiling_by_a_model_function_wrapper(lab: Any, stack: bool) -> None:
    def change(model: Any) -> None:
        model.model_options["model_function_wrapper"] = tile_function(stack)

    hooked = compare(lab, change, conds(lab))
    assert hooked.state.report.notes == ["one forward per set of hooks: a model function wrapper may change the batch"]
    assert {g["path"] for g in hooked.state.report.as_dict()["groups"]} == {"side path"}


@pytest.mark.parametrize(
    "place, how, note",
    [
        # These pass on the numbers of rows like any input, so each row keeps its set.
        ("APPLY_MODEL", stacked, None),
        ("APPLY_MODEL", in_turn, None),
        ("DIFFUSION_MODEL", stacked, "6 rows in a model call of 3"),
        ("DIFFUSION_MODEL", in_turn, "is called more than once in a model call"),
    ],
)
def test_tiling_by_a_wrapper(lab: Any, place: str, how: Callable, note: str | None) -> None:
    def change(model: Any) -> None:
        model.add_wrapper_with_key(getattr(host.WrappersMP, place), "tiles", partial(tile_wrapper, how=how))

    hooked = compare(lab, change, conds(lab))
    report = hooked.state.report.as_dict()
    assert {g["path"] for g in report["groups"]} == {"side path"}
    assert len(report["notes"]) == (note is not None)
    assert note is None or ("one forward per set of hooks" in report["notes"][0] and note in report["notes"][0])


@pytest.mark.parametrize("place", ["APPLY_MODEL", "DIFFUSION_MODEL"])
def test_other_rows_of_the_same_number(lab: Any, place: str) -> None:
    """Four rows in the batch and four in each call, but not the same ones: counting would not tell."""

    def change(model: Any) -> None:
        model.add_wrapper_with_key(getattr(host.WrappersMP, place), "tiles", pairs_of_rows)

    positive, negative = conds(lab)
    hooked = compare(lab, change, (positive, [*negative, *lab.cond(51)]))
    (note,) = hooked.state.report.notes
    assert "one forward per set of hooks" in note and "called more than once" in note


def test_a_wrapper_that_drops_what_it_does_not_know(lab: Any) -> None:
    """Then nothing says which set a call is for: replacement weights come by another way."""
    known = ("c_crossattn", "y", "guidance", "context", "pooled", "transformer_options")

    def change(model: Any) -> None:
        model.model_options["model_function_wrapper"] = tile_function(True, keeps=known)

    hooked = compare(lab, change, conds(lab))
    report = hooked.state.report.as_dict()
    assert "merged: a wrapper around the model does not pass on which row uses which set" in report["notes"]
    assert {g["path"] for g in report["groups"]} == {"merged"}
    with pytest.raises(HooklineError, match="can't take the side path: a wrapper around the model does not pass on"):
        lab.sample(apply_hookline(hooked, "side_path"), *conds(lab), size=SIZE)
    hooked.model_options.pop("model_function_wrapper")
    lab.sample(hooked, *conds(lab), size=SIZE)
    assert {g["path"] for g in hooked.state.report.as_dict()["groups"]} == {"side path"}


def test_tiles_in_turn_all_get_a_merged_set(lab: Any) -> None:
    """The stock loader's result, tile by tile: the set stays for as long as the wrapper calls with its options."""
    hooks, changed = lab.hooks(lab.inverted), tile_function(stack=False)
    out, expected = (
        lab.sample(tiled(model, changed), *(lab.cond(i, hooks=h) for i in (1, 2)), size=SIZE)
        for model, h in (
            (apply_hookline(lab.model(), "merged"), hooks),
            (lab.stock_lora(lab.model(), lab.inverted), None),
        )
    )
    assert torch.equal(out, expected)


def tiled(model: Any, wrapper: Callable) -> Any:
    model.model_options["model_function_wrapper"] = wrapper
    return model


# ---- attention couple


def couple(model: Any, contexts: Tensor) -> None:
    """Each row of a positive prompt attends to its own words and to those of each region [regions, words, width].

    Rows of `attn2` are repeated for that; then the tokens of each region take what its words gave.
    """
    copies = 1 + len(contexts)

    def chunks(x: Tensor, options: dict[str, Any]) -> list[tuple[bool, Tensor]]:
        sides = options["cond_or_uncond"]
        return [(side == 0, chunk) for side, chunk in zip(sides, x.chunk(len(sides)))]

    def before(n: Tensor, context: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        queries, words = [], []
        for (positive, n_chunk), (_, c_chunk) in zip(chunks(n, options), chunks(context, options)):
            queries.append(torch.cat([n_chunk] * copies) if positive else n_chunk)
            regions = [region[None].expand_as(c_chunk) for region in contexts]
            words.append(torch.cat([c_chunk, *regions]) if positive else c_chunk)
        return torch.cat(queries), torch.cat(words), torch.cat(words)

    def after(n: Tensor, options: dict[str, Any]) -> Tensor:
        sides = options["cond_or_uncond"]
        counts = [copies if side == 0 else 1 for side in sides]
        rows = n.shape[0] // sum(counts)
        out = []
        for part in n.split([count * rows for count in counts]):
            own, *regions = part.split(rows)
            for i, region in enumerate(regions):
                tokens = slice(i * own.shape[1] // len(regions), (i + 1) * own.shape[1] // len(regions))
                own = own.clone()
                own[:, tokens] = (own[:, tokens] + region[:, tokens]) / 2
            out.append(own)
        return torch.cat(out)

    model.set_model_attn2_patch(before)
    model.set_model_attn2_output_patch(after)


@pytest.mark.parametrize("name", ["SD1.5", "SDXL"])
def test_r98_attention_couple(lab: Any, name: str) -> None:
    """Two prompts with different LoRAs, and rows multiplied inside the model."""
    if lab.name == "embedded":
        pytest.skip("needs ComfyUI's architectures")
    import comfy.sample

    architecture = ARCHITECTURES[name]
    model = make(architecture)
    groups = [group(lora(model, seed)) for seed in (1, 2, 3)]
    masks = torch.zeros(2, 1, 16, 16)
    masks[0, ..., :8], masks[1, ..., 8:] = 1, 1
    random = torch.Generator().manual_seed(0)
    words = torch.randn(5, 1, 7, architecture.context, generator=random)
    positive = [
        c for i in (0, 1) for c in set_props([[words[i], {**architecture.options}]], hooks=groups[i], mask=masks[i])[0]
    ]
    negative = set_props([[words[2], {**architecture.options}]], hooks=groups[2])[0]

    def sample(patcher: Any) -> Tensor:
        noise = torch.randn(architecture.latent, generator=torch.manual_seed(1))
        sides = positive, negative, torch.zeros(architecture.latent)
        return comfy.sample.sample(patcher, noise, 2, 3.0, "euler", "simple", *sides, disable_pbar=True, seed=1)

    uncoupled = sample(apply_hookline(model, "merged"))
    model = model.clone()
    couple(model, words[3:, 0])
    expected = sample(apply_hookline(model, "merged"))
    hooked = apply_hookline(model)
    out = sample(hooked)
    assert (expected - uncoupled).norm() > 1e-3 * uncoupled.norm()
    # Rounding of float32 sums, against the size of what coupling does.
    assert (out - expected).norm() <= 1e-3 * (expected - uncoupled).norm()
    (note,) = hooked.state.report.notes
    # Three copies of each of the two positive rows, and the negative one.
    assert "one forward per set of hooks" in note and "attn2" in note and "7 rows in a model call of 3" in note
