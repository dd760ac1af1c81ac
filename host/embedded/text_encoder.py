"""CLIP: a text encoder with its tokenizer and patcher, with the interface of ComfyUI's `comfy.sd.CLIP`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .models import load_models
from .patcher import ModelPatcher


class CLIP:
    def __init__(self, cond_stage_model: nn.Module, tokenizer: Any, patcher: ModelPatcher) -> None:
        self.cond_stage_model, self.tokenizer, self.patcher = cond_stage_model, tokenizer, patcher
        self.apply_hooks_to_conds = None
        self.use_clip_schedule = False

    def clone(self) -> CLIP:
        copy = CLIP(self.cond_stage_model, self.tokenizer, self.patcher.clone())
        copy.apply_hooks_to_conds, copy.use_clip_schedule = self.apply_hooks_to_conds, self.use_clip_schedule
        return copy

    def add_patches(self, patches: dict, strength_patch: float = 1.0, strength_model: float = 1.0) -> list:
        return self.patcher.add_patches(patches, strength_patch, strength_model)

    def tokenize(self, text: str, return_word_ids: bool = False) -> dict[str, list]:
        return self.tokenizer.tokenize_with_weights(text, return_word_ids)

    def load_model(self, tokens: dict | None = None) -> ModelPatcher:
        load_models([self.patcher])
        return self.patcher

    def encode_from_tokens(
        self, tokens: dict[str, list], return_pooled: bool = False, return_dict: bool = False
    ) -> Any:
        """Tokens -> context [1, words, dim]; with it the pooled [1, dim], or a dict of all outputs and the hooks."""
        self.load_model(tokens)
        context, pooled, *others = self.cond_stage_model.encode_token_weights(tokens)
        if return_dict:
            return self.add_hooks_to_dict({"cond": context, "pooled_output": pooled, **(others[0] if others else {})})
        return (context, pooled) if return_pooled else context

    def encode_from_tokens_scheduled(
        self, tokens: dict[str, list], add_dict: dict[str, Any] | None = None
    ) -> list[list]:
        """Tokens -> CONDITIONING. (Text encoders that follow a schedule: `patcher/text_encoder.py`.)"""
        out = self.encode_from_tokens(tokens, return_dict=True)
        return [[out.pop("cond"), {**out, **(add_dict or {})}]]

    def add_hooks_to_dict(self, entry: dict[str, Any]) -> dict[str, Any]:
        if self.apply_hooks_to_conds:
            entry["hooks"] = self.apply_hooks_to_conds
        return entry

    def encode(self, text: str) -> Tensor:
        return self.encode_from_tokens(self.tokenize(text))


def make_clip(text_model: nn.Module, tokenizer: Any) -> CLIP:
    """A CLIP from a text encoder (`encode_token_weights(tokens) -> context, pooled`) and its tokenizer."""
    patcher = ModelPatcher(text_model.to(torch.float32).requires_grad_(False).eval())
    patcher.is_clip = True
    return CLIP(text_model, tokenizer, patcher)
