"""Hooks on text encoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline import host
from hookline.errors import HooklineError
from hookline.hooks.group import with_keyframes
from hookline.hooks.keyframes import ScheduleKeyframes
from hookline.hooks.schedule import parse
from hookline.patcher.text_encoder import MOST_ENCODINGS


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


class Counted:
    """How often a text encoder has encoded."""

    def __init__(self, clip: Any) -> None:
        self.count = 0
        clip.cond_stage_model.register_forward_pre_hook(self.note)

    def note(self, *_: Any) -> None:
        self.count += 1

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


def test_r82_a_strength_that_comes_back_is_encoded_once(lab: Any, clip: Any) -> None:
    text = "0: 1, 0.3: 0.5 hold, 0.6: 1 hold, 0.8: 0.5 hold"
    hooks = with_keyframes(lab.hooks(lab.bold_next, 0.0, 1.0), ScheduleKeyframes(parse(text)))
    hooked, calls = set_hooks(lab, clip, hooks, schedule_clip=True), Counted(clip)
    entries = encode(hooked)
    assert calls.since() == 2 and len(entries) == 4
    assert torch.equal(entries[0][0], entries[2][0]) and not torch.equal(entries[0][0], entries[1][0])


def test_r83_encodings_are_remembered_by_text_set_and_strength(lab: Any, clip: Any) -> None:
    hooked, calls = set_hooks(lab, clip, lab.hooks(lab.bold_next, 0.0, 1.0)), Counted(clip)
    first = encode(hooked)
    assert calls.since() == 1
    again = encode(hooked)
    assert calls.since() == 0 and torch.equal(again[0][0], first[0][0])
    again[0][1]["pooled_output"] = None
    assert encode(hooked)[0][1]["pooled_output"] is not None, "one caller's changes reach another"
    assert not torch.equal(encode(hooked, "digit one")[0][0], first[0][0]) and calls.since() == 1
    other = set_hooks(lab, clip, lab.hooks(lab.bold_next, 0.0, 0.5))
    assert not torch.equal(encode(other)[0][0], first[0][0])
    hooked.add_patches({"embedding.weight": ("diff", (torch.ones(12, 64),))}, 1.0)
    assert not torch.equal(encode(hooked)[0][0], first[0][0]), "a LoRA loaded meanwhile is not forgotten"


def test_encodings_that_are_remembered_are_few(lab: Any, clip: Any) -> None:
    hooked = set_hooks(lab, clip, lab.hooks(lab.bold_next, 0.0, 1.0))
    for number in range(40):
        encode_tokens(hooked, number)
    assert len(hooked.remembered) == MOST_ENCODINGS


def encode_tokens(clip: Any, number: int) -> Any:
    return clip.encode_from_tokens({"tiny": [[(number % 12, 1.0), (number // 12, 1.0)]]})


def test_all_outputs_of_the_text_encoder_are_kept(lab: Any, clip: Any) -> None:
    """Attention masks, say, which core drops as soon as the text encoder follows a schedule."""
    encoder = clip.cond_stage_model
    plain = encoder.encode_token_weights
    encoder.encode_token_weights = lambda tokens: (*plain(tokens)[:2], {"attention_mask": torch.ones(1, 2)})
    hooks = with_keyframes(lab.hooks(lab.bold_next, 0.0, 1.0), ScheduleKeyframes(parse("0: 1, 0.5: 0.5 hold")))
    for schedule in (False, True):
        entries = encode(set_hooks(lab, clip, hooks, schedule_clip=schedule))
        assert len(entries) == 1 + schedule
        assert all(options["attention_mask"].shape == (1, 2) for _, options in entries)
    del encoder.encode_token_weights


def test_every_way_of_calling_gives_the_hooked_encoding(lab: Any, clip: Any) -> None:
    """Third-party encoders ask for a dictionary; older nodes for pooled or not."""
    hooks = lab.hooks(lab.bold_next, 1.0, 1.0)
    hooked, tokens = set_hooks(lab, clip, hooks, apply_to_conds=True), clip.tokenize("digit seven")
    expected, pooled = stock(lab, clip, 1.0).encode_from_tokens(tokens, return_pooled=True)
    assert torch.equal(hooked.encode_from_tokens(tokens), expected)
    assert torch.equal(hooked.encode("digit seven"), expected)
    assert torch.equal(hooked.encode_from_tokens(tokens, return_pooled=True)[1], pooled)
    out = hooked.encode_from_tokens(tokens, return_pooled=True, return_dict=True)
    assert torch.equal(out["cond"], expected) and torch.equal(out["pooled_output"], pooled) and out["hooks"] is hooks
    ((context, options),) = hooked.encode_from_tokens_scheduled(tokens, add_dict={"width": 512})
    assert torch.equal(context, expected) and options["width"] == 512 and "cond" not in options


def test_a_clone_goes_on_encoding_with_hooks(lab: Any, clip: Any) -> None:
    """CLIP Set Last Layer and the like work on clones."""
    hooked = set_hooks(lab, clip, lab.hooks(lab.bold_next, 0.0, 1.0))
    copy = hooked.clone()
    assert type(copy) is type(hooked) and not copy.remembered
    assert torch.equal(encode(copy)[0][0], encode(hooked)[0][0])
    assert torch.equal(encode(clip)[0][0], encode(lab.tiny()[1])[0][0])


def test_c56_encoding_moves_no_keyframes(lab: Any, clip: Any) -> None:
    hooks = with_keyframes(lab.hooks(lab.bold_next, 0.0, 1.0), ScheduleKeyframes(parse("0: 1, 0.5: 0.5 hold")))
    hooked = set_hooks(lab, clip, hooks, schedule_clip=True)
    frames = hooked.patcher.forced_hooks.hooks[0].hook_keyframe
    before = frames._current_keyframe

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = clip.cond_stage_model.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        encode(hooked)
    handle.remove()
    assert frames._current_keyframe is before and hooked.patcher.progress is None
    assert len(encode(hooked)) == 2 and frames._current_keyframe is before


def test_c57_at_text_encoder_strength_zero_no_weight_is_computed_or_swapped(lab: Any, clip: Any) -> None:
    hooked = set_hooks(lab, clip, lab.hooks(lab.bold_next, 1.0, 0.0))
    hooked.load_model()
    parameters = dict(clip.cond_stage_model.named_parameters())
    seen = []
    clip.cond_stage_model.register_forward_pre_hook(
        lambda module, _: seen.append(all(p is parameters[n] for n, p in module.named_parameters()))
    )
    assert torch.equal(encode(hooked)[0][0], encode(clip)[0][0])
    assert seen[0] and hooked.patcher.state.report.weights_computed == 0


@pytest.mark.parametrize("schedule", [False, True])
def test_r80_a_hook_without_text_encoder_weights_is_one_encoding(lab: Any, clip: Any, schedule: bool) -> None:
    hooks = with_keyframes(lab.hooks(lab.inverted, 1.0, 1.0), ScheduleKeyframes(parse("0: 0, 1: 1")))
    hooked, calls = set_hooks(lab, clip, hooks, schedule_clip=schedule, apply_to_conds=True), Counted(clip)
    ((context, options),) = encode(hooked)
    assert calls.since() == 1 and options["hooks"] is hooks
    assert torch.equal(context, encode(clip)[0][0])


def test_r84_weights_of_one_for_all_blocks_are_the_plain_lora(lab: Any, clip: Any) -> None:
    """Its text-encoder part included, which block weights leave alone."""
    inputs = {"lora_name": lab.bold_next, "strength_model": 1.0, "strength_clip": 1.0}
    (plain,) = lab.node("HooklineCreateLora", **inputs)
    expected = encode(set_hooks(lab, clip, plain))[0][0]
    for text in ("all=1", "double=0, single=0.5"):
        (weighted,) = lab.node("HooklineCreateLora", **inputs, block_weights=text)
        assert torch.equal(encode(set_hooks(lab, clip, weighted))[0][0], expected)


class Packed(torch.Tensor):
    """As GGUF loaders have it: bytes that claim the shape of what they stand for."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Packed:
        return torch.Tensor._make_subclass(cls, weight.half().view(torch.uint8), False)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*super().shape[:-1], super().shape[-1] // 2])


def pack(lab: Any, clip: Any) -> tuple[str, torch.nn.Module]:
    """A layer of the text encoder with packed weights, unpacked when it is called; -> (its weight's key, the layer)."""
    encoder = clip.cond_stage_model
    name = next(iter(host.load_lora(lab.lora_tensors(lab.bold_next), host.clip_key_map(encoder))))
    layer = encoder.get_submodule(name.removesuffix(".weight"))
    half = layer.weight.detach().half()
    layer._parameters["weight"] = torch.nn.Parameter(Packed(half), requires_grad=False)
    layer.forward = lambda x: torch.nn.functional.linear(x, half.to(x), layer.bias)
    return name, layer


def test_r22_packed_text_encoder_weights_take_the_side_path(lab: Any, clip: Any) -> None:
    """Against the same encoder with the half-precision values in plain weights, merged. float32 rounding."""
    name, layer = pack(lab, clip)
    packed, original = lab.raw(layer.weight.data.as_subclass(torch.Tensor)), layer.weight
    hooks = lab.hooks(lab.bold_next, 0.0, 1.0)
    hooked = set_hooks(lab, clip, hooks)
    out = encode(hooked)[0][0]
    assert hooked.patcher.state.report.weights_computed == 0
    assert layer.weight is original and lab.raw(layer.weight.data.as_subclass(torch.Tensor)) == packed
    assert not layer._forward_hooks

    plain = lab.tiny()[1]
    same = plain.cond_stage_model.get_submodule(name.removesuffix(".weight"))
    same.weight.data.copy_(same.weight.half())
    expected = encode(set_hooks(lab, plain, hooks))[0][0]
    assert (expected - encode(plain)[0][0]).abs().max() > 1e-2
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_r22_what_packed_weights_can_not_take_is_refused_in_words(lab: Any, clip: Any) -> None:
    name, layer = pack(lab, clip)
    hooks = lab.hooks(lab.bold_next, 0.0, 1.0)
    (hook,) = hooks.hooks
    hook.weights = {f"text_encoders.{name.removesuffix('.weight')}.diff": torch.ones(layer.weight.shape)}
    hook.lora = None
    hooked = set_hooks(lab, clip, hooks)
    with pytest.raises(HooklineError, match=rf"{name}.*holds torch.uint8 codes"):
        encode(hooked)


def test_a_text_encoder_with_no_room_for_a_copy_is_not_merged(
    lab: Any, clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32: the same products in another order."""
    hooks = lab.hooks(lab.bold_next, 0.0, 1.0)
    expected = encode(set_hooks(lab, clip, hooks))[0][0]
    monkeypatch.setattr(host, "free_memory", lambda device: 1000.0)
    hooked = set_hooks(lab, lab.tiny()[1], hooks)
    torch.testing.assert_close(encode(hooked)[0][0], expected, rtol=1e-5, atol=1e-5)
    assert hooked.patcher.state.report.weights_computed == 0
