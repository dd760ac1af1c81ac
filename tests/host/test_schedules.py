"""Schedules over a run: strength at each model call, and what is merged for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hookline import host
from hookline.hooks.group import combine, with_keyframes
from hookline.hooks.keyframes import ScheduleKeyframes
from hookline.hooks.schedule import parse
from hookline.patcher.model_patcher import apply_hookline

merged = partial(apply_hookline, path="merged")


def scheduled(lab: Any, name: str, text: str, strength: float = 1.0) -> host.HookGroup:
    return with_keyframes(lab.hooks(name, strength), ScheduleKeyframes(parse(text)))


def traced(lab: Any, hooks: host.HookGroup) -> tuple[Any, list[tuple[float, tuple[float, ...]]]]:
    """A hooked model, and a list that gets (sigma, strengths of the hooks) at every step."""
    hooked, trace = merged(lab.model()), []

    def note(executor: Any, model: Any, *args: Any) -> Any:
        patcher = model.current_patcher
        trace.append((patcher.position[0], tuple(patcher.strength(hook) for hook in hooks.hooks)))
        return executor(model, *args)

    hooked.add_wrapper_with_key(host.WrappersMP.CALC_COND_BATCH, "trace", note)
    return hooked, trace


def strengths(trace: list) -> list[float]:
    return [values[0] for _, values in trace]


def test_r86_split_sampling_gives_each_step_the_strength_of_the_unsplit_run(lab: Any) -> None:
    hooks = scheduled(lab, lab.inverted, "0: 0, 1: 1")
    hooked, trace = traced(lab, hooks)
    conds = lab.cond(1, hooks=hooks), lab.cond(2)
    expected = lab.sample(hooked, *conds, steps=8)
    whole = list(trace)
    trace.clear()
    half = lab.sample(hooked, *conds, steps=8, last_step=3)
    out = lab.sample(hooked, *conds, steps=8, start_step=3, latent=half)
    assert trace == whole and len(whole) == 8
    # Between the stages the latent is scaled to the VAE's range, divided by 1 - sigma, and back: a few roundings.
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_r87_a_new_strength_replaces_the_old_one(lab: Any) -> None:
    """0.9 then 1.0 is not 1.9: the second half of the run is the stock loader's at 1.0."""
    hooks = scheduled(lab, lab.inverted, "0: 0.9, 0.5: 1 hold")
    hooked, trace = traced(lab, hooks)
    out = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks), steps=4)
    assert strengths(trace) == [0.9, 0.9, 1.0, 1.0]
    stock = [lab.stock_lora(hooked, lab.inverted, s) for s in (0.9, 1.0)]
    half = lab.sample(stock[0], lab.cond(1), lab.cond(2), steps=4, last_step=2)
    expected = lab.sample(stock[1], lab.cond(1), lab.cond(2), steps=4, start_step=2, latent=half)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_r88_three_loras_take_turns(lab: Any) -> None:
    turns = {lab.inverted: "0: 1, 0.2: 0 hold, 0.6: 1 hold, 0.8: 0 hold", lab.slanted: "0: 0, 0.2: 1 hold, 0.4: 0 hold"}
    turns[lab.bold_next] = "0: 0, 0.4: 1 hold, 0.6: 0 hold, 0.8: 1 hold"
    hooks = combine(*(scheduled(lab, name, text) for name, text in turns.items()))
    hooked, trace = traced(lab, hooks)
    lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2), steps=5)
    assert [values for _, values in trace] == [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 1)]
    used = [[hook["lora"] for hook in group["hooks"]] for group in hooked.state.report.as_dict()["groups"]]
    assert used == [[lab.inverted], [lab.slanted], [lab.bold_next]]


@pytest.mark.parametrize("scheduler", ["simple", "normal"])
@pytest.mark.parametrize("percent", [0.0, 0.1, 0.25, 0.5, 0.77, 1.0])
def test_r90_percent_means_sigma_for_every_scheduler(lab: Any, scheduler: str, percent: float) -> None:
    """A flow model with shift 1 is at progress 1 - sigma; guidance calls are not steps."""
    hooks = scheduled(lab, lab.inverted, f"0: 0.25, {percent}: 0.75 hold")
    hooked, trace = traced(lab, hooks)
    lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks), steps=10, scheduler=scheduler)
    assert len(trace) == 10
    assert strengths(trace) == [0.75 if 1 - sigma >= percent - 1e-6 else 0.25 for sigma, _ in trace]


def test_r91_interpolated_strengths_at_each_step(lab: Any) -> None:
    """Merged weights are made for 16 levels of a slope, each at its true strength."""
    hooks = scheduled(lab, lab.inverted, "0: 0, 1: 1 ease_in")
    hooked, trace = traced(lab, hooks)
    lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2), steps=8)
    assert strengths(trace) == [(step / 8) ** 2 for step in range(8)]


def test_c14_s8_second_run_starting_where_the_first_ended(lab: Any) -> None:
    hooks = scheduled(lab, lab.inverted, "0: 0.1, 0.75: 0.9 hold")
    hooked, trace = traced(lab, hooks)
    conds = lab.cond(1, hooks=hooks), lab.cond(2)
    lab.sample(hooked, *conds, steps=4)
    lab.sample(hooked, *conds, steps=4, start_step=3, latent=torch.zeros(1, 16, 8, 8) + 0.1)
    assert strengths(trace) == [0.1, 0.1, 0.1, 0.9, 0.9]


def test_strength_zero_part_of_a_schedule_computes_nothing(lab: Any) -> None:
    hooks = scheduled(lab, lab.inverted, "0: 0, 0.5: 0, 0.5: 1")
    hooked, _ = traced(lab, hooks)
    lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2), steps=4)
    report = hooked.state.report.as_dict()
    assert [hook["strength"] for group in report["groups"] for hook in group["hooks"]] == [1.0]


def test_our_schedule_on_the_hosts_own_path(lab: Any) -> None:
    """Without Apply Hookline the same conditioning still works, at the same strengths."""
    hooks = scheduled(lab, lab.inverted, "0: 1, 0.5: 0.5 hold")
    model = lab.model()
    conds = lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)
    expected = lab.sample(merged(model), *conds, steps=4)
    assert torch.equal(lab.sample(model, *conds, steps=4), expected)
