"""A Flux-layout transformer and the model object that samplers call.

Parameter names and maths are those of the published FLUX.1 checkpoints (black-forest-labs/flux, schnell: no guidance
embedding), so one safetensors file serves this host and ComfyUI.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...patcher.extension import WrapperExecutor, WrappersMP, get_all_wrappers
from . import ops as float_ops

PATCH = 2
AXES_DIM = (16, 56, 56)
THETA = 10_000


@dataclass(frozen=True)
class FluxConfig:
    """Sizes of a Flux checkpoint; `from_state_dict` reads them off the tensors."""

    in_channels: int
    context_dim: int
    vec_dim: int
    hidden: int
    double_blocks: int
    single_blocks: int

    @classmethod
    def from_state_dict(cls, tensors: dict[str, Tensor]) -> FluxConfig:
        """Raises KeyError when the tensors are not a Flux checkpoint."""

        def count(prefix: str) -> int:
            return len({key.split(".")[1] for key in tensors if key.startswith(prefix)})

        hidden, patch_dim = tensors["img_in.weight"].shape
        return cls(
            in_channels=patch_dim // PATCH**2,
            context_dim=tensors["txt_in.weight"].shape[1],
            vec_dim=tensors["vector_in.in_layer.weight"].shape[1],
            hidden=hidden,
            double_blocks=count("double_blocks."),
            single_blocks=count("single_blocks."),
        )

    @property
    def heads(self) -> int:
        return self.hidden // sum(AXES_DIM)


def timestep_embedding(t: Tensor, dim: int = 256) -> Tensor:
    """t [n] in 0..1 -> [n, dim], sinusoidal, time factor 1000."""
    half = dim // 2
    freqs = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = 1000.0 * t.float()[:, None] * freqs[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rope(ids: Tensor) -> Tensor:
    """Position ids [n, tokens, 3] -> rotation matrices [n, 1, tokens, head_dim / 2, 2, 2], float32."""
    parts = []
    for axis, dim in enumerate(AXES_DIM):
        omega = 1.0 / THETA ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = ids[..., axis, None].double() * omega
        parts.append(torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1))
    return torch.cat(parts, dim=-2).unflatten(-1, (2, 2)).float().unsqueeze(1)


def rotate(x: Tensor, pe: Tensor) -> Tensor:
    """x [n, heads, tokens, head_dim] turned by its positions."""
    pairs = x.float().unflatten(-1, (-1, 1, 2))
    return (pe[..., 0] * pairs[..., 0] + pe[..., 1] * pairs[..., 1]).flatten(-2).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, pe: Tensor) -> Tensor:
    """q, k, v [n, heads, tokens, head_dim] -> [n, tokens, heads * head_dim]."""
    out = F.scaled_dot_product_attention(rotate(q, pe), rotate(k, pe), v)
    return out.transpose(1, 2).flatten(2)


class MLPEmbedder(nn.Module):
    def __init__(self, in_dim: int, hidden: int, ops: Any) -> None:
        super().__init__()
        self.in_layer = ops.Linear(in_dim, hidden)
        self.out_layer = ops.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


class QKNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query_norm = nn.RMSNorm(dim)
        self.key_norm = nn.RMSNorm(dim)


class SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, ops: Any) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = ops.Linear(hidden, 3 * hidden)
        self.norm = QKNorm(hidden // heads)
        self.proj = ops.Linear(hidden, hidden)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split_heads(self.qkv(x), self.heads, self.norm)


def split_heads(qkv: Tensor, heads: int, norm: QKNorm) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return norm.query_norm(q), norm.key_norm(k), v


class Modulation(nn.Module):
    def __init__(self, hidden: int, parts: int, ops: Any) -> None:
        super().__init__()
        self.parts = parts
        self.lin = ops.Linear(hidden, parts * hidden)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(vec))[:, None].chunk(self.parts, dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return (1 + scale) * F.layer_norm(x, x.shape[-1:], eps=1e-6) + shift


def mlp(hidden: int, ops: Any) -> nn.Sequential:
    return nn.Sequential(ops.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), ops.Linear(4 * hidden, hidden))


class DoubleStreamBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, ops: Any) -> None:
        super().__init__()
        for stream in ("img", "txt"):
            setattr(self, f"{stream}_mod", Modulation(hidden, 6, ops))
            setattr(self, f"{stream}_attn", SelfAttention(hidden, heads, ops))
            setattr(self, f"{stream}_mlp", mlp(hidden, ops))

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        i_shift1, i_scale1, i_gate1, i_shift2, i_scale2, i_gate2 = self.img_mod(vec)
        t_shift1, t_scale1, t_gate1, t_shift2, t_scale2, t_gate2 = self.txt_mod(vec)
        i_qkv = self.img_attn.project(modulate(img, i_shift1, i_scale1))
        t_qkv = self.txt_attn.project(modulate(txt, t_shift1, t_scale1))
        q, k, v = (torch.cat([t, i], dim=2) for t, i in zip(t_qkv, i_qkv))
        out = attention(q, k, v, pe)
        t_out, i_out = out[:, : txt.shape[1]], out[:, txt.shape[1] :]
        img = img + i_gate1 * self.img_attn.proj(i_out)
        img = img + i_gate2 * self.img_mlp(modulate(img, i_shift2, i_scale2))
        txt = txt + t_gate1 * self.txt_attn.proj(t_out)
        txt = txt + t_gate2 * self.txt_mlp(modulate(txt, t_shift2, t_scale2))
        return img, txt


class SingleStreamBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, ops: Any) -> None:
        super().__init__()
        self.hidden, self.heads = hidden, heads
        self.linear1 = ops.Linear(hidden, 7 * hidden)
        self.linear2 = ops.Linear(5 * hidden, hidden)
        self.norm = QKNorm(hidden // heads)
        self.modulation = Modulation(hidden, 3, ops)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vec)
        qkv, inner = self.linear1(modulate(x, shift, scale)).split([3 * self.hidden, 4 * self.hidden], dim=-1)
        out = attention(*split_heads(qkv, self.heads, self.norm), pe)
        return x + gate * self.linear2(torch.cat([out, F.gelu(inner, approximate="tanh")], dim=-1))


class LastLayer(nn.Module):
    def __init__(self, hidden: int, out_dim: int, ops: Any) -> None:
        super().__init__()
        self.linear = ops.Linear(hidden, out_dim)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), ops.Linear(hidden, 2 * hidden))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        return self.linear(modulate(x, shift, scale))


class Flux(nn.Module):
    """x [n, c, h, w], timestep [n] in 0..1, context [n, words, context_dim], y [n, dim] -> velocity [n, c, h, w]."""

    def __init__(self, config: FluxConfig, ops: Any = float_ops) -> None:
        super().__init__()
        hidden, heads = config.hidden, config.heads
        self.config = config
        self.img_in = ops.Linear(config.in_channels * PATCH**2, hidden)
        self.time_in = MLPEmbedder(256, hidden, ops)
        self.vector_in = MLPEmbedder(config.vec_dim, hidden, ops)
        self.txt_in = ops.Linear(config.context_dim, hidden)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(hidden, heads, ops) for _ in range(config.double_blocks))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(hidden, heads, ops) for _ in range(config.single_blocks))
        self.final_layer = LastLayer(hidden, config.in_channels * PATCH**2, ops)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor,
        guidance: Tensor | None = None,
        ref_latents: list | None = None,
        control: dict | None = None,
        transformer_options: dict | None = None,
    ) -> Tensor:
        """Runs the DIFFUSION_MODEL wrappers around `_forward`, with ComfyUI's argument order."""
        options = transformer_options or {}
        executor = WrapperExecutor(self._forward, self, get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options))
        return executor.execute(x, timestep, context, y, guidance, ref_latents, control, options)

    def _forward(self, x: Tensor, timestep: Tensor, context: Tensor, y: Tensor, *_: Any) -> Tensor:
        height, width = x.shape[2:]
        img = F.pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2)
        ids = torch.zeros(1, context.shape[1] + img.shape[1], 3, device=x.device)
        grid = torch.meshgrid(torch.arange(height // PATCH), torch.arange(width // PATCH), indexing="ij")
        ids[0, context.shape[1] :, 1:] = torch.stack(grid, dim=-1).flatten(0, 1).to(ids)
        pe = rope(ids)

        img, txt = self.img_in(img), self.txt_in(context)
        vec = self.time_in(timestep_embedding(timestep).to(img.dtype)) + self.vector_in(y)
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, pe)
        img = torch.cat([txt, img], dim=1)
        for block in self.single_blocks:
            img = block(img, vec, pe)
        img = self.final_layer(img[:, context.shape[1] :], vec)
        img = img.transpose(1, 2).unflatten(2, (height // PATCH, width // PATCH))
        return F.pixel_shuffle(img, PATCH)


class FlowSampling:
    """Rectified flow: x = sigma * noise + (1 - sigma) * data, predicted is noise - data. Shift 1, as in schnell."""

    sigma_max = 1.0
    sigmas = torch.arange(1, 1001) / 1000

    def percent_to_sigma(self, percent: float) -> float:
        """Progress 0 (first step) .. 1 (end) -> sigma 1 .. 0."""
        return min(max(1.0 - percent, 0.0), 1.0)


class FluxModel(nn.Module):
    """What samplers call: the transformer plus flow sampling and Flux's latent scale (ComfyUI's `model_base.Flux`)."""

    latent_channels = 16
    scale_factor, shift_factor = 0.3611, 0.1159

    def __init__(self, diffusion_model: Flux) -> None:
        super().__init__()
        self.diffusion_model = diffusion_model
        self.model_sampling = FlowSampling()
        self.current_patcher = None

    def process_latent_in(self, latent: Tensor) -> Tensor:
        return (latent - self.shift_factor) * self.scale_factor

    def process_latent_out(self, latent: Tensor) -> Tensor:
        return latent / self.scale_factor + self.shift_factor

    def memory_required(self, input_shape: list[int]) -> float:
        """Rough working memory in bytes of one forward over `input_shape`, for the batching rule."""
        return 3.1 * input_shape[0] * math.prod(input_shape[2:]) * 4 * 2048

    def apply_model(
        self,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: dict | None = None,
        transformer_options: dict | None = None,
        **conds: Any,
    ) -> Tensor:
        """x [n, 16, h, w] at sigma t [n] -> the denoised latent, through the APPLY_MODEL wrappers."""
        options = transformer_options or {}
        executor = WrapperExecutor(self._apply_model, self, get_all_wrappers(WrappersMP.APPLY_MODEL, options))
        return executor.execute(x, t, c_concat, c_crossattn, control, options, **conds)

    def _apply_model(
        self, x: Tensor, t: Tensor, _concat: None, context: Tensor, control: Any, options: dict, y: Tensor
    ) -> Tensor:
        velocity = self.diffusion_model(x, t, context, y, control=control, transformer_options=options)
        return x - velocity.float() * t.view(-1, 1, 1, 1)
