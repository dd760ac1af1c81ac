"""Additive forms against float64 formulas that share no code with them, and against the host's merged weight."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hookline.host.embedded.lora import LoRAAdapter, calculate_weight
from hookline.patcher.adapters import additive
from hookline.patcher.forms import InputGain, Kronecker, LowRank, NotAdditive, Offset, OutputGain
from hookline.patcher.rotation import Turning

OUT, IN, RANK = 48, 40, 4


def rnd(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def adapter(name: str, *weights: Tensor | float | None) -> SimpleNamespace:
    """As the host's adapters look from outside."""
    return SimpleNamespace(name=name, weights=weights)


def difference(form: LowRank) -> Tensor:
    """The weight difference that a form stands for, in float64."""
    return form.scale * (form.up.double() @ form.down.flatten(1).double()).reshape(
        form.up.shape[0], *form.down.shape[1:]
    )


def no_base() -> Tensor:
    raise AssertionError("this kind does not need the base weight")


def make(patch: object, shape: tuple[int, ...] = (OUT, IN), base: object = no_base, **kwargs: object) -> LowRank:
    (form,) = additive(patch, "weight", torch.Size(shape), base, kwargs.get("offset"), kwargs.get("function"))
    return form


def close(a: Tensor, b: Tensor) -> None:
    """Factors are float32 (24 bits), products are summed in float64."""
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [None, 2.0])
def test_lora(alpha: float | None) -> None:
    up, down = rnd(OUT, RANK), rnd(RANK, IN)
    form = make(adapter("lora", up, down, alpha, None, None, None))
    expected = (up.double() @ down.double()) * (1 if alpha is None else alpha / RANK)
    close(difference(form), expected)
    # The factors are the file's own, not copies of another size.
    assert form.down is down


def test_lora_equals_the_hosts_merge() -> None:
    patch = LoRAAdapter(rnd(OUT, RANK), rnd(RANK, IN), 2.0)
    merged = calculate_weight([(0.5, patch, 1.0, None, None)], torch.zeros(OUT, IN), "x.weight")
    close(0.5 * difference(make(patch)), merged.double())


def test_locon_and_its_tucker_core() -> None:
    up, down = rnd(OUT, RANK, 1, 1), rnd(RANK, IN, 3, 3)
    form = make(adapter("lora", up, down, None, None, None, None), (OUT, IN, 3, 3))
    close(difference(form), torch.einsum("or,rikl->oikl", up[..., 0, 0].double(), down.double()))
    down, mid = rnd(RANK, IN, 1, 1), rnd(RANK, RANK, 3, 3)
    form = make(adapter("lora", up, down, 2.0, mid, None, None), (OUT, IN, 3, 3))
    expected = torch.einsum("or,rskl,si->oikl", *(t.double() for t in (up[..., 0, 0], mid, down[..., 0, 0]))) / 2
    close(difference(form), expected)


def test_linear_lora_on_a_pointwise_convolution() -> None:
    up, down = rnd(OUT, RANK), rnd(RANK, IN)
    form = make(adapter("lora", up, down, None, None, None, None), (OUT, IN, 1, 1))
    close(difference(form)[..., 0, 0], up.double() @ down.double())


def test_loha() -> None:
    a1, b1, a2, b2 = rnd(OUT, 2), rnd(2, IN), rnd(OUT, 3) + 1, rnd(3, IN) + 1
    form = make(adapter("loha", a1, b1, 4.0, a2, b2, None, None, None))
    close(difference(form), (a1.double() @ b1.double()) * (a2.double() @ b2.double()) * 4 / 2)


def test_loha_whose_rank_is_too_high_to_pay_is_one_difference() -> None:
    a1, b1, a2, b2 = rnd(OUT, 8), rnd(8, IN), rnd(OUT, 8) + 1, rnd(8, IN) + 1
    form = make(adapter("loha", a1, b1, 4.0, a2, b2, None, None, None))
    close(kron(form) / 8, (a1.double() @ b1.double()) * (a2.double() @ b2.double()) * 4 / 8 / 8)


@pytest.mark.parametrize("rank", [2, 6])
def test_loha_with_tucker_cores_against_lycoris(rank: int) -> None:
    """Low-rank and whole, with LyCORIS's own function as the oracle."""
    from lycoris.functional.loha import diff_weight

    a1, b1, t1 = rnd(rank, OUT), rnd(rank, IN), rnd(rank, rank, 3, 3)
    a2, b2, t2 = rnd(rank, OUT) + 1, rnd(rank, IN) - 1, rnd(rank, rank, 3, 3) + 1
    form = make(adapter("loha", a1, b1, 1.0, a2, b2, t1, t2, None), (OUT, IN, 3, 3))
    expected = diff_weight(*(t.double() for t in (b1, a1, b2, a2, t1, t2)), gamma=1.0, backend="torch") / rank
    found = kron(form) if isinstance(form, Kronecker) else difference(form)
    assert isinstance(form, Kronecker) == (rank == 6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def turned(patch: object, weight: Tensor, strength: float) -> Tensor:
    """The weight after the rotation, found by turning the outputs of a layer without bias."""
    (form,) = additive(patch, "weight", weight.shape, no_base, None, None)
    columns = weight.flatten(1).t().double()
    module = Turning(form).double()
    return (columns + module.difference(columns, strength)).t().reshape(weight.shape)


@pytest.mark.parametrize("shape", [(OUT, IN), (OUT, IN, 3, 3)])
@pytest.mark.parametrize("constraint", [None, 0.5])
def test_oft_against_lycoris(shape: tuple[int, ...], constraint: float | None) -> None:
    """At strength 1, where LyCORIS and ComfyUI agree. float32 blocks: 1e-5."""
    from lycoris.functional.diag_oft import diff_weight

    weight, blocks = rnd(*shape), rnd(12, 4, 4) / 4
    delta = diff_weight(weight, blocks, None, constraint=constraint or 0, backend="torch").double()
    torch.testing.assert_close(
        turned(adapter("oft", blocks, None, constraint, None), weight, 1.0), weight + delta, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("strength", [1.0, 0.4])
@pytest.mark.parametrize("rescaled", [False, True])
def test_boft_against_lycoris(strength: float, rescaled: bool) -> None:
    """32 outputs, three stages of blocks of 4. LyCORIS's difference is scaled once more by the loader."""
    from lycoris.functional.boft import diff_weight

    weight, blocks = rnd(32, IN), rnd(3, 8, 4, 4) / 4
    rescale = rnd(32, 1).abs() + 0.5 if rescaled else None
    patch = adapter("boft", blocks, rescale, None, None)
    delta = diff_weight(weight, blocks, rescale, constraint=0, scale=strength, backend="torch").double()
    torch.testing.assert_close(turned(patch, weight, strength), weight + strength * delta, rtol=1e-5, atol=1e-5)


def kron(form: Kronecker) -> Tensor:
    first = form.first.double().view(*form.first.shape, *[1] * (form.second.dim() - 2))
    return form.scale * torch.kron(first, form.second.double().contiguous())


def test_lokr_with_whole_low_rank_and_tucker_factors() -> None:
    w1, a, b = rnd(4, 2), rnd(12, 3), rnd(3, 20)
    form = make(adapter("lokr", w1, None, 6.0, None, None, a, b, None, None))
    close(kron(form), torch.kron(w1.double(), a.double() @ b.double()) * 6 / 3)
    # With both factors whole there is no rank, and alpha means nothing (as in LyCORIS and ComfyUI).
    form = make(adapter("lokr", w1, rnd(12, 20), 6.0, None, None, None, None, None, None))
    close(kron(form), torch.kron(w1.double(), rnd(12, 20).double()))
    a1, b1 = rnd(4, 2) + 1, rnd(2, 2)
    form = make(adapter("lokr", None, rnd(12, 20), 3.0, a1, b1, None, None, None, None))
    close(kron(form), torch.kron(a1.double() @ b1.double(), rnd(12, 20).double()) * 3 / 2)
    core, a, b = rnd(3, 3, 3, 3), rnd(3, 12), rnd(3, 20)
    form = make(adapter("lokr", w1, None, None, None, None, a, b, core, None), (OUT, IN, 3, 3))
    second = torch.einsum("ijkl,jr,ip->prkl", core.double(), b.double(), a.double()).contiguous()
    close(kron(form), torch.kron(w1.double()[..., None, None], second))


def test_glora_needs_the_base_weight_once() -> None:
    a1, a2, b1, b2, weight = rnd(IN, RANK), rnd(RANK, IN) + 1, rnd(OUT, RANK), rnd(RANK, IN), rnd(OUT, IN)
    form = make(adapter("glora", a1, a2, b1, b2, None, None), base=lambda: weight)
    expected = weight.double() @ a1.double() @ a2.double() + b1.double() @ b2.double()
    torch.testing.assert_close(difference(form), expected, rtol=1e-5, atol=1e-4)


def test_slices_of_fused_weights() -> None:
    up, down = rnd(16, RANK), rnd(RANK, IN)
    form = make(adapter("lora", up, down, None, None, None, None), offset=(0, 32, 16))
    assert form.out_slice == (32, 16) and form.in_slice is None
    up, down = rnd(OUT, RANK), rnd(RANK, 8)
    form = make(adapter("lora", up, down, None, None, None, None), offset=(1, 24, 8))
    assert form.in_slice == (24, 8) and form.out_slice is None


def test_row_functions() -> None:
    up, down = rnd(OUT, RANK), rnd(RANK, IN)

    def swap(weight: Tensor) -> Tensor:
        return torch.cat(weight.chunk(2)[::-1])

    form = make(adapter("lora", up, down, None, None, None, None), function=swap)
    close(difference(form), swap(up.double() @ down.double()))
    with pytest.raises(NotAdditive, match="does not act on rows alone"):
        make(adapter("lora", up, down, None, None, None, None), function=lambda w: w.abs())


def test_bias_difference() -> None:
    (form,) = additive(("diff", (rnd(OUT),)), "bias", torch.Size([OUT]), no_base, None, None)
    assert isinstance(form, Offset) and torch.equal(form.vector, rnd(OUT))


@pytest.mark.parametrize("shape", [(OUT, IN), (OUT, IN, 3, 3)])
def test_dora_per_output(shape: tuple[int, ...]) -> None:
    """W + s (m / |W| (W + BA) - W), with the norm of each row of the base weight (arXiv 2402.09353 at s = 1)."""
    up, down, magnitude, weight = rnd(OUT, RANK), rnd(RANK, *shape[1:]), rnd(OUT).abs() + 1, rnd(*shape)
    patch = adapter("lora", up, down, 2.0, None, magnitude.view(-1, *[1] * (len(shape) - 1)), None)
    gain, form = additive(patch, "weight", torch.Size(shape), lambda: weight, None, None)
    assert isinstance(gain, OutputGain)
    flat = weight.double().flatten(1)
    exact = magnitude.double() / flat.norm(dim=1)
    expected = exact[:, None] * (flat + up.double() @ down.double().flatten(1) * 2 / RANK) - flat
    torch.testing.assert_close(
        gain.gain.double()[:, None] * flat + difference(form).flatten(1), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(OUT, IN), (OUT, IN, 3, 3)])
def test_dora_per_input(shape: tuple[int, ...]) -> None:
    """W + s (m / |W + BA| (W + BA) - W), with the norm of each input's column of the sum."""
    up, down, weight = rnd(OUT, RANK), rnd(RANK, *shape[1:]), rnd(*shape)
    magnitude = (rnd(IN).abs() + 1).view(1, -1, *[1] * (len(shape) - 2))
    patch = adapter("lora", up, down, 2.0, None, magnitude, None)
    gain, form = additive(patch, "weight", torch.Size(shape), lambda: weight, None, None)
    assert isinstance(gain, InputGain)
    changed = weight.double() + torch.einsum("or,ri...->oi...", up.double(), down.double()) * 2 / RANK
    norm = changed.transpose(0, 1).flatten(1).norm(dim=1).view(magnitude.shape)
    expected = magnitude.double() / norm * changed - weight.double()
    columns = gain.gain.double().view(magnitude.shape)
    torch.testing.assert_close(columns * weight.double() + difference(form), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (("diff", (rnd(OUT, IN),)), "dense difference"),
        (("set", (rnd(OUT, IN),)), "replacement"),
        (("model_as_lora", (rnd(OUT, IN),)), "difference to another model"),
        (adapter("lora", rnd(OUT, 2), rnd(2, IN), None, None, rnd(1, 3), None), "DoRA magnitudes"),
        (adapter("lora", rnd(OUT, 2), rnd(2, IN), None, None, None, [96, IN]), "changes the weight's shape"),
        (adapter("lora", rnd(OUT, 2), rnd(2, IN + 1), None, None, None, None), "does not fit"),
        (adapter("lokr", rnd(4, 2), rnd(12, 21), None, None, None, None, None, None, None), "does not fit"),
        (adapter("lora", rnd(OUT, 2), rnd(3, IN), None, None, None, None), "different ranks"),
        (adapter("oft", rnd(4, 4, 4), None, None, None), "does not fit"),
        (adapter("oft", rnd(12, 4, 4), rnd(OUT), None, None), "OFT with rescaling"),
        (adapter("boft", rnd(1, 12, 4, 4), None, None, rnd(OUT, 1)), "OFT or BOFT with DoRA"),
    ],
)
def test_what_has_no_additive_form_says_why(patch: object, reason: str) -> None:
    with pytest.raises(NotAdditive, match=reason):
        make(patch, base=lambda: rnd(OUT, IN))
