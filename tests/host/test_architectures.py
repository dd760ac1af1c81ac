"""The side path on ComfyUI's own architectures, tiny and random: reach, and the stock loader's result."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline import host
from hookline.hooks.conditioning import set_props
from hookline.patcher.model_patcher import apply_hookline

UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1],
    "channel_mult": [1, 2], "use_spatial_transformer": True, "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1, "context_dim": 64,
    "use_temporal_attention": False, "legacy": False,
}  # fmt: skip
LTXV = {
    "image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 256, "attention_head_dim": 32,
    "num_attention_heads": 8, "caption_channels": 64, "num_layers": 2,
}  # fmt: skip
WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2,
    "text_dim": 64, "in_dim": 16, "out_dim": 16, "freq_dim": 256,
}  # fmt: skip


MASK = {"attention_mask": torch.ones(1, 7, dtype=torch.int64)}


@dataclass
class Architecture:
    """A class of `comfy.supported_models`, its sizes, and inputs for it."""

    name: str
    config: dict[str, Any]
    latent: tuple[int, ...]
    context: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    quantize: str | None = None


ARCHITECTURES = {
    "SD1.5": Architecture(
        "SD15", {**UNET, "num_heads": 2, "use_linear_in_transformer": False, "adm_in_channels": None}, (1, 4, 16, 16)
    ),
    "SDXL": Architecture(
        "SDXL",
        {**UNET, "model_channels": 64, "num_head_channels": 64, "use_linear_in_transformer": True,
         "adm_in_channels": 1536 + 64, "num_classes": "sequential"},
        (1, 4, 16, 16),
        options={"pooled_output": torch.zeros(1, 64)},
    ),
    "SD3": Architecture(
        "SD3",
        {"in_channels": 16, "patch_size": 2, "depth": 2, "input_size": None, "adm_in_channels": 32,
         "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}},
         "num_patches": 64, "pos_embed_max_size": 8, "pos_embed_scaling_factor": None},
        (1, 16, 16, 16),
        options={"pooled_output": torch.zeros(1, 32)},
    ),
    "Wan": Architecture("WAN21_T2V", WAN, (1, 16, 2, 8, 8)),
    "Wan INT8": Architecture("WAN21_T2V", WAN, (1, 16, 2, 8, 8), quantize="int8_rowwise"),
    "Lumina2": Architecture(
        "Lumina2",
        {"image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 192, "cap_feat_dim": 64, "n_layers": 2,
         "n_heads": 2, "n_kv_heads": 1, "qk_norm": True, "axes_dims": [32, 32, 32], "axes_lens": [30, 64, 64],
         "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0, "n_refiner_layers": 1},
        (1, 16, 8, 8),
    ),
    "Qwen-Image": Architecture(
        "QwenImage",
        {"image_model": "qwen_image", "in_channels": 64, "num_layers": 2, "attention_head_dim": 128,
         "num_attention_heads": 1, "joint_attention_dim": 64},
        (1, 16, 1, 8, 8),
    ),
    "LTXV": Architecture("LTXV", LTXV, (1, 128, 2, 4, 4), options=MASK),
    "LTXV INT8": Architecture("LTXV", LTXV, (1, 128, 2, 4, 4), options=MASK, quantize="int8_rowwise"),
}  # fmt: skip


def make(architecture: Architecture) -> Any:
    """A MODEL with random weights; with `quantize`, the blocks' matrices in that format."""
    import comfy.model_patcher
    import comfy.supported_models as supported

    config = getattr(supported, architecture.name)(dict(architecture.config))
    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = None
    model = config.get_model({}, "")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for buffer in model.diffusion_model.buffers():
            buffer.zero_()
        for name, p in model.diffusion_model.named_parameters():
            spread = torch.randn(p.shape, generator=random) * (
                0.7 / max(p[0].numel(), 1) ** 0.5 if p.dim() > 1 else 0.02
            )
            p.copy_(1 + spread if "norm" in name and name.endswith("weight") else spread)
    if architecture.quantize:
        from hookline.host.embedded.quant import quantize_checkpoint

        tensors = model.diffusion_model.state_dict()
        quantized = quantize_checkpoint(
            tensors, lambda layer, w: architecture.quantize if "blocks." in layer and w.shape[1] % 16 == 0 else None
        )
        config = getattr(supported, architecture.name)(dict(architecture.config))
        config.quant_config = {"mixed_ops": True}
        config.set_inference_dtype(torch.float32, torch.float32)
        config.custom_operations = None
        model = config.get_model({}, "")
        missing, unexpected = model.diffusion_model.load_state_dict(quantized, strict=False)
        assert not missing and not unexpected
    model.eval().requires_grad_(False)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def lora(model: Any, seed: int) -> dict[str, Tensor]:
    """Rank 4 on every matrix and kernel that ComfyUI's loader can name."""
    random = torch.Generator().manual_seed(seed)
    names = {key: name for name, key in host.model_key_map(model.model).items() if isinstance(key, str)}
    tensors = {}
    for path, module in model.model.named_modules():
        weight = getattr(module, "weight", None)
        name = names.get(f"{path}.weight")
        if name is None or not isinstance(weight, Tensor) or weight.dim() < 2 or isinstance(module, nn.Embedding):
            continue
        out, *inner = weight.shape
        size = 0.3 / (4 * torch.Size(inner).numel()) ** 0.5
        pointwise = [1] * (len(inner) - 1)
        tensors[f"{name}.lora_down.weight"] = torch.randn(4, *inner, generator=random) * size
        tensors[f"{name}.lora_up.weight"] = torch.randn(out, 4, *pointwise, generator=random) * 0.5
    return tensors


def sample(model: Any, architecture: Architecture, hooks: list[Any]) -> Tensor:
    """Two steps; positive and negative halves with a group of hooks each."""
    import comfy.sample

    latent = torch.zeros(architecture.latent)
    noise = torch.randn(latent.shape, generator=torch.manual_seed(1))
    sides = []
    for seed, group in enumerate(hooks):
        context = torch.randn(1, 7, architecture.context, generator=torch.Generator().manual_seed(seed))
        options = {"num_tokens": 7, **architecture.options}
        sides.append(set_props([[context, options]], hooks=group)[0])
    return comfy.sample.sample(model, noise, 2, 3.0, "euler", "simple", *sides, latent, disable_pbar=True, seed=1)


def group(tensors: dict[str, Tensor]) -> Any:
    hook = host.WeightHook()
    hook.weights = tensors
    out = host.HookGroup()
    out.add(hook)
    return out


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_layer_is_reached_and_the_result_is_the_loaders(lab: Any, name: str) -> None:
    if lab.name == "embedded":
        pytest.skip("needs ComfyUI's architectures")
    import comfy.sd

    architecture = ARCHITECTURES[name]
    model = make(architecture)
    first, second = lora(model, 1), lora(model, 2)
    groups = group(first), group(second)
    hooked = apply_hookline(model)
    paths = [key.rpartition(".")[0] for key in hooked.known(groups[0].hooks[0]).mapping.patches]
    assert len(paths) > 20
    calls = dict.fromkeys(paths, 0)

    def count(path: str) -> Any:
        def counted(*_: Any) -> None:
            calls[path] += 1

        return counted

    handles = [hooked.model.get_submodule(path).register_forward_hook(count(path)) for path in paths]
    out = sample(hooked, architecture, list(groups))
    [handle.remove() for handle in handles]
    report = hooked.state.report.as_dict()
    assert report["notes"] == [] and {g["path"] for g in report["groups"]} == {"side path"}
    assert report["forwards"] == 2 and set(calls.values()) == {2}
    plain = sample(model, architecture, [None, None])
    assert torch.isfinite(plain).all() and plain.abs().max() > 0
    effect = out - plain
    assert effect.norm() > 1e-3 * plain.norm()
    if architecture.quantize:
        # The same as on the float model: 1 % of quantization error per layer bends what the LoRA does downstream.
        exact = make(replace(architecture, quantize=None))
        expected = sample(apply_hookline(exact), architecture, list(groups))
        expected = expected - sample(exact, architecture, [None, None])
        assert (effect - expected).norm() <= 0.2 * expected.norm()
        return
    # Rounding of float32 sums, against the size of what the LoRAs do.
    merged = sample(apply_hookline(model, "merged"), architecture, list(groups))
    assert (out - merged).norm() <= 1e-3 * effect.norm()
    stock = comfy.sd.load_lora_for_models(model, None, first, 1.0, 0)[0]
    expected = sample(stock, architecture, [None, None])
    got = sample(apply_hookline(model, "side_path"), architecture, [groups[0], groups[0]])
    assert (got - expected).norm() <= 1e-3 * (expected - plain).norm()
