"""Hooks on text encoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline import host
from hookline.hooks.group import with_keyframes
from hookline.hooks.keyframes import ScheduleKeyframes
from hookline.hooks.schedule import parse


@pytest.fixture
def clip(lab: Any) -> Any:
    return lab.tiny()[1]


def encode(clip: Any, text: str = "digit seven") -> list:
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def stock(lab: Any, clip: Any, strength: float) -> Any:
    clip = clip.clone()
    tensors = lab.lora_tensors(lab.bold_next)
    clip.add_patches(host.load_lora(tensors, host.clip_key_map(clip.cond_stage_model)), strength)
    return clip


def set_hooks(lab: Any, clip: Any, hooks: Any, apply_to_conds: bool = False, schedule_clip: bool = False) -> Any:
    inputs = {"clip": clip, "hooks": hooks, "apply_to_conds": apply_to_conds, "schedule_clip": schedule_clip}
    return lab.node("HooklineSetClipHooks", **inputs)[0]


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_encoding_with_hooks_is_the_stock_loaders_encoding(lab: Any, clip: Any, strength: float) -> None:
    (expected, options), plain = encode(stock(lab, clip, strength))[0], encode(clip)[0][0]
    snapshot = lab.Snapshot(clip.cond_stage_model)
    hooked = set_hooks(lab, clip, lab.hooks(lab.bold_next, 0.0, strength_clip=strength))
    for _ in range(2):
        ((context, got),) = encode(hooked)
        assert torch.equal(context, expected) and torch.equal(got["pooled_output"], options["pooled_output"])
        assert torch.equal(encode(clip)[0][0], plain)
        assert "hooks" not in got
    assert not torch.equal(expected, plain)
    clip.load_model()
    snapshot.check()


def test_hooks_reach_the_conditioning_when_asked(lab: Any, clip: Any) -> None:
    hooks = lab.hooks(lab.bold_next, 1.0, 1.0)
    ((_, options),) = encode(set_hooks(lab, clip, hooks, apply_to_conds=True))
    assert options["hooks"] is hooks


def test_r80_hooks_without_text_encoder_weights_change_nothing(lab: Any, clip: Any) -> None:
    hooked = set_hooks(lab, clip, lab.hooks(lab.inverted, 1.0, 1.0))
    assert torch.equal(encode(hooked)[0][0], encode(clip)[0][0])


def test_no_hooks_pass_the_clip_through(lab: Any, clip: Any) -> None:
    assert set_hooks(lab, clip, None) is clip


def test_schedule_encodes_once_per_strength(lab: Any, clip: Any) -> None:
    hooks = with_keyframes(
        lab.hooks(lab.bold_next, 0.0, 1.0), ScheduleKeyframes(parse("0: 1, 0.4: 0.5 hold, 0.7: 0 hold"))
    )
    entries = encode(set_hooks(lab, clip, hooks, schedule_clip=True))
    ranges = [(options["clip_start_percent"], options["clip_end_percent"]) for _, options in entries]
    assert ranges == [(0.0, 0.4), (0.4, 0.7), (0.7, 1.0)]
    for (context, _), strength in zip(entries, (1.0, 0.5, 0.0)):
        assert torch.equal(context, encode(stock(lab, clip, strength))[0][0]), strength


@pytest.mark.parametrize(("span", "count"), [((0.0, 1.0), 3), ((0.5, 0.6), 1), ((0.0, 0.3), 1), ((0.5, 1.0), 2)])
def test_r82_only_strengths_inside_the_conds_range_are_encoded(lab: Any, clip: Any, span: tuple, count: int) -> None:
    text = "0: 1, 0.4: 0.5 hold, 0.5: 0.5, 0.7: 0.25 hold"
    hooks = with_keyframes(lab.hooks(lab.bold_next, 0.0, 1.0), ScheduleKeyframes(parse(text)))
    hooked = set_hooks(lab, clip, hooks, schedule_clip=True)
    calls = []
    handle = clip.cond_stage_model.register_forward_hook(lambda *_: calls.append(1))
    add_dict = {"start_percent": span[0], "end_percent": span[1]}
    entries = hooked.encode_from_tokens_scheduled(hooked.tokenize("digit seven"), add_dict=add_dict)
    handle.remove()
    assert len(entries) == len(calls) == count


def test_unscheduled_text_encoder_takes_the_hooks_own_strength(lab: Any, clip: Any) -> None:
    hooks = with_keyframes(lab.hooks(lab.bold_next, 0.0, 0.5), ScheduleKeyframes(parse("0: 0, 1: 1")))
    assert torch.equal(encode(set_hooks(lab, clip, hooks))[0][0], encode(stock(lab, clip, 0.5))[0][0])


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_failing_while_encoding_restores(lab: Any, clip: Any, error: BaseException) -> None:
    hooked = set_hooks(lab, clip, lab.hooks(lab.bold_next, 0.0, 1.0))
    expected = encode(hooked)[0][0]
    snapshot = lab.Snapshot(clip.cond_stage_model)

    def boom(*_: Any) -> None:
        raise error

    handle = clip.cond_stage_model.pooled.register_forward_hook(boom)
    with pytest.raises(type(error)):
        # Another text: the first one is remembered.
        encode(hooked, "digit one")
    handle.remove()
    snapshot.check()
    assert torch.equal(encode(hooked)[0][0], expected)


def test_lora_loaded_on_top_of_hooks_keeps_both(lab: Any, clip: Any) -> None:
    """A clone of a hooked CLIP with a static LoRA: the hook is computed together with it."""
    both = stock(lab, set_hooks(lab, clip, lab.hooks(lab.bold_next, 0.0, 0.25)), 0.5)
    once = stock(lab, stock(lab, clip, 0.5), 0.25)
    assert torch.equal(encode(both)[0][0], encode(once)[0][0])
