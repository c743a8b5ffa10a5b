"""A forecast as one page of text.

Pure: owns the words and the layout. The command prints it.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from stronghold.forecast.forecast import Forecast, Gain, Tier, Timing

WIDTH = 100
GIB = float(1 << 30)
LABEL = 12
SAME = 0.005  # a step that changes by less is the same


def page(forecast: Forecast, *, config_path: str | None = None) -> str:
    """The page; `config_path` is where the config was written, None prints it."""
    blocks = [_head(forecast)]
    if forecast.refusal is not None:
        blocks.append(_wrap(forecast.refusal))
    blocks += [_notes(forecast), _memory(forecast.tiers), _plan(forecast.reasons)]
    if forecast.timing is not None:
        blocks.append(_prediction(forecast.timing))
    blocks += [_limit(forecast), _gains(forecast), _config(forecast, config_path)]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _head(forecast: Forecast) -> list[str]:
    asked = forecast.asked
    steps = f" x {asked.accumulation} micro-batches" if asked.accumulation > 1 else ""
    ranks = f" x {asked.gpus} ranks" if asked.gpus > 1 else ""
    ranks += f" x {asked.nodes} nodes" if asked.nodes > 1 else ""
    clipping = f"clipped at {asked.clipping:g}" if asked.clipping else "no clipping"
    return [
        *_wrap(
            f"{asked.model}: {asked.num_parameters / 1e9:.3g} B parameters in {asked.num_blocks} "
            f"blocks"
        ),
        f"{asked.dtype}, batch {asked.batch} x {asked.seq} tokens{steps}{ranks} = "
        f"{asked.tokens:,} tokens per step, {clipping}",
        f"on {asked.machine}",
        "",
        "FITS" if forecast.fits else "DOES NOT FIT",
    ]


def _notes(forecast: Forecast) -> list[str]:
    return [line for note in forecast.notes for line in _wrap(f"note: {note}")]


def _memory(tiers: Sequence[Tier]) -> list[str]:
    lines = ["Memory"] if tiers else []
    for tier in tiers:
        share = tier.planned_bytes / tier.budget_bytes if tier.budget_bytes else 0.0
        parts = ", ".join(f"{name} {gib(size)}" for name, size in tier.parts.items() if size)
        figure = f"{gib(tier.planned_bytes)} of {gib(tier.budget_bytes)} GiB ({share:.0%})"
        lines += _labelled(tier.name, f"{figure}: {parts}" if parts else figure)
    return lines


def _plan(reasons: Sequence[str]) -> list[str]:
    if not reasons:
        return []
    return ["Plan", *(line for reason in reasons for line in _wrap(reason, "  ", "    "))]


def _prediction(timing: Timing) -> list[str]:
    first, *others = timing.shares.items() or [("nothing", 0.0)]
    bound = f"{first[0]}, {first[1]:.0%} of the step"
    rest = ", ".join(f"{name} {share:.0%}" for name, share in others if share >= SAME)
    busy = ", ".join(f"{lane} {share:.0%}" for lane, share in timing.busy.items() if share >= SAME)
    return [
        "Prediction",
        *_labelled("step", f"{seconds(timing.step_s)}, {timing.tokens_per_s:,.0f} tokens/s"),
        *_labelled("bound", f"{bound}; then {rest}" if rest else bound),
        *(_labelled("lanes busy", busy) if busy else []),
    ]


def _limit(forecast: Forecast) -> list[str]:
    limits, timing = forecast.limits, forecast.timing
    distance = ""
    if timing is not None and timing.step_s > 0.0:
        distance = f"; the plan reaches {limits.seconds / timing.step_s:.0%} of it"
    tokens = forecast.asked.tokens / limits.seconds if limits.seconds > 0.0 else 0.0
    parts = ", ".join(
        f"{name} {seconds(value)}" for name, value in _descending(limits.parts) if value > 0.0
    )
    if limits.fill_s > 0.0:
        parts += f"; one layer's way in and out {seconds(limits.fill_s)}"
    even = forecast.break_even
    return [
        "Physical limit",
        *_labelled("step", f"{seconds(limits.seconds)}, {tokens:,.0f} tokens/s{distance}"),
        *_labelled("set by", limits.bound),
        *_labelled("resources", parts),
        *_labelled(
            "break even",
            f"compute outlasts the CPU's Adam from {even.cpu:,.0f} tokens per step, the weights' "
            f"way to the GPU from {even.link:,.0f} tokens per micro-batch",
        ),
    ]


def _descending(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: -part[1])


def _gains(forecast: Forecast) -> list[str]:
    if not forecast.gains:
        return []
    width = max(LABEL, *(len(gain.change) for gain in forecast.gains))
    return [
        "What more would buy",
        *(f"  {gain.change:<{width}}  {_gain(gain, forecast.timing)}" for gain in forecast.gains),
    ]


def _gain(gain: Gain, timing: Timing | None) -> str:
    if gain.step_s is None or gain.tokens_per_s is None:
        return "does not fit"
    speed = f"{gain.tokens_per_s:,.0f} tokens/s, step {seconds(gain.step_s)}"
    if timing is None:
        return f"fits: {speed}"
    change = gain.tokens_per_s / timing.tokens_per_s - 1
    return "nothing" if abs(change) < SAME else f"{change:+.0%}: {speed}"


def _config(forecast: Forecast, path: str | None) -> list[str]:
    if forecast.config is None:
        return []
    if path is not None:
        return [f"The config is in {path}"]
    return ["Config", *textwrap.indent(config_text(forecast.config), "  ").splitlines()]


def config_text(config: dict[str, Any]) -> str:
    """The config as a file: one key per line, short lists and sections in one line as people write
    them."""
    text = json.dumps(config, indent=2)
    # Innermost lists, and objects of one key.
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", _in_one_line, text)
    return re.sub(r'\{\s+("[^][{},]*?)\s+\}', _in_one_line, text)


def _in_one_line(match: re.Match[str]) -> str:
    inner = re.sub(r"\s*\n\s*", " ", match[1])
    return f"{match[0][0]}{inner}{match[0][-1]}"


# -- figures --------------------------------------------------------------------------------------


def gib(nbytes: float) -> str:
    """Bytes in GiB, without the unit."""
    size = nbytes / GIB
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"


def seconds(value: float) -> str:
    """A duration with its unit."""
    if value == float("inf"):
        return "never"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def _labelled(label: str, text: str) -> list[str]:
    head = f"  {label:<{LABEL}}"
    return _wrap(text, head, " " * len(head))


def _wrap(text: str, first: str = "", then: str = "") -> list[str]:
    return list(_wrapped(text, first, then))


def _wrapped(text: str, first: str, then: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines()):
        yield from textwrap.wrap(
            line,
            WIDTH,
            initial_indent=then if number else first,
            subsequent_indent=then,
            break_long_words=False,
            break_on_hyphens=False,
        )
