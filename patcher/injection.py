"""One injection: the safety bracket around what the host does with weights, and where text encoders are hooked."""

from __future__ import annotations

from typing import Any


def inject(patcher: Any) -> None:
    """A text encoder encodes with its hooks. (Diffusion models are hooked per call, by a wrapper.)"""
    if not patcher.is_clip:
        return
    model = patcher.model
    encode = model.encode_token_weights

    def encode_token_weights(*args: Any, **kwargs: Any) -> Any:
        return patcher.encoded(lambda: encode(*args, **kwargs))

    # What another pack had put there, if anything.
    encode_token_weights.hookline_replaced = model.__dict__.get("encode_token_weights")
    model.encode_token_weights = encode_token_weights


def eject(patcher: Any) -> None:
    """Called by the host before it loads, unloads, moves or lists weights: it must find the base ones."""
    patcher.state.journal.restore()
    ours = patcher.model.__dict__.get("encode_token_weights")
    if hasattr(ours, "hookline_replaced"):
        del patcher.model.encode_token_weights
        if ours.hookline_replaced is not None:
            patcher.model.encode_token_weights = ours.hookline_replaced
