"""A forecast as one page of text, a sweep as a table and a picture.

Owns the words and the layout. The command prints them.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stronghold.tools.estimate.answer import Forecast, seconds

WIDTH = 100
GIB = float(1 << 30)
LABEL = 12
SAME = 0.005  # a step that changes by less is the same


def page(forecast: Forecast, *, config_path: str | None = None) -> str:
    """The page; `config_path` is where the config was written, None prints it."""
    blocks = [_head(forecast)]
    if forecast.refusal is not None:
        blocks.append(_wrap(forecast.refusal))
    blocks.append([line for note in forecast.notes for line in _wrap(f"note: {note}")])
    blocks.append(_memory(forecast))
    reasons = [line for reason in forecast.reasons for line in _wrap(reason, "  ", "    ")]
    blocks.append(["Plan", *reasons] if reasons else [])
    if forecast.fits:
        blocks.append(_prediction(forecast))
    blocks += [_limit(forecast), _gains(forecast)]
    if config_path is not None and forecast.config is not None:
        blocks.append([f"The config is in {config_path}"])
    elif forecast.config is not None:
        text = textwrap.indent(config_text(forecast.config), "  ")
        blocks.append(["Config", *text.splitlines()])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _head(forecast: Forecast) -> list[str]:
    asked = forecast.question
    steps = f" x {asked.accumulation} micro-batches" if asked.accumulation > 1 else ""
    if asked.chunk is not None:
        turns = f" on {asked.streams} streams" if asked.streams > 1 else ""
        steps = f" in chunks of {asked.chunk}{turns}{steps}"
    ranks = f" x {asked.gpus} ranks" if asked.gpus > 1 else ""
    ranks += f" x {asked.nodes} nodes" if asked.nodes > 1 else ""
    clipping = f"clipped at {asked.clipping:g}" if asked.clipping else "no clipping"
    states = "" if asked.states == "exact" else f" with {asked.states} states"
    model = asked.model
    sizes = f"{model.layout.num_parameters / 1e9:.3g} B parameters in {model.num_blocks} blocks"
    return [
        *_wrap(f"{model.name}: {sizes}"),
        f"{asked.dtype}{states}, batch {asked.batch} x {asked.seq} tokens{steps}{ranks} = "
        f"{asked.tokens:,} tokens per step, {clipping}",
        f"on {asked.machine.name}",
        "",
        "FITS" if forecast.fits else "DOES NOT FIT",
    ]


def _memory(forecast: Forecast) -> list[str]:
    lines = ["Memory"] if forecast.tiers else []
    for name, (budget, sizes) in forecast.tiers.items():
        planned = sum(sizes.values())
        share = planned / budget if budget else 0.0
        parts = ", ".join(f"{part} {gib(size)}" for part, size in sizes.items() if size)
        figure = f"{gib(planned)} of {gib(budget)} GiB ({share:.0%})"
        lines += _labelled(name, f"{figure}: {parts}" if parts else figure)
    return lines


def _prediction(forecast: Forecast) -> list[str]:
    first, *others = forecast.shares.items() or [("nothing", 0.0)]
    bound = f"{first[0]}, {first[1]:.0%} of the step"
    rest = ", ".join(f"{name} {share:.0%}" for name, share in others if share >= SAME)
    busy = ", ".join(
        f"{lane} {share:.0%}" for lane, share in forecast.busy.items() if share >= SAME
    )
    return [
        "Prediction",
        *_labelled("step", f"{seconds(forecast.step_s)}, {forecast.tokens_per_s:,.0f} tokens/s"),
        *_labelled("bound", f"{bound}; then {rest}" if rest else bound),
        *(_labelled("lanes busy", busy) if busy else []),
    ]


def _limit(forecast: Forecast) -> list[str]:
    limits, distance = forecast.limits, ""
    if forecast.fits and forecast.step_s > 0.0:
        distance = f"; the plan reaches {limits.seconds / forecast.step_s:.0%} of it"
    tokens = forecast.question.tokens / limits.seconds if limits.seconds > 0.0 else 0.0
    descending = sorted(limits.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {seconds(value)}" for name, value in descending if value > 0.0)
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
            f"compute outlasts the CPU's updates from {even.cpu:,.0f} tokens per step, the "
            f"weights' way to the GPU from {even.link:,.0f} tokens per micro-batch",
        ),
    ]


def _gains(forecast: Forecast) -> list[str]:
    if not forecast.gains:
        return []
    width = max(LABEL, *(len(change) for change, _ in forecast.gains))
    rows = [f"  {change:<{width}}  {_gain(gain, forecast)}" for change, gain in forecast.gains]
    return ["What more would buy", *rows]


def _gain(gain: Forecast | None, forecast: Forecast) -> str:
    if gain is None:
        return "does not fit"
    speed = f"{gain.tokens_per_s:,.0f} tokens/s, step {seconds(gain.step_s)}"
    if not forecast.fits:
        return f"fits: {speed}"
    change = gain.tokens_per_s / forecast.tokens_per_s - 1
    return "nothing" if abs(change) < SAME else f"{change:+.0%}: {speed}"


def config_text(config: dict[str, Any]) -> str:
    """The config as a file: one key per line, short lists and sections in one line."""
    text = json.dumps(config, indent=2)
    # Innermost lists, and objects of one key.
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", _in_one_line, text)
    return re.sub(r'\{\s+("[^][{},]*?)\s+\}', _in_one_line, text)


def _in_one_line(match: re.Match[str]) -> str:
    inner = re.sub(r"\s*\n\s*", " ", match[1])
    return f"{match[0][0]}{inner}{match[0][-1]}"


# -- a sweep --------------------------------------------------------------------------------------
def table(points: Sequence[tuple[int, Forecast]], axis: str) -> str:
    """One line per point of `answer.sweep`."""
    lines = [f"{axis:>9}  {'step':>9}  {'tokens/s':>9}  {'limit':>9}  bound"]
    for value, found in points:
        if not found.fits:
            lines.append(f"{value:>9,}  does not fit")
            continue
        lines.append(
            f"{value:>9,}  {seconds(found.step_s):>9}  {found.tokens_per_s:>9,.0f}  "
            f"{seconds(found.limits.seconds):>9}  {found.bound}"
        )
    return "\n".join(lines)


def draw(points: Sequence[tuple[int, Forecast]], axis: str, png: Path) -> None:
    """The same as a picture."""
    from stronghold.tools import plot  # matplotlib: only for those who draw

    question = points[0][1].question
    names = {"window": "window, slots", "batch": "sequences per micro-batch", "seq": "tokens"}
    title = f"{question.model.name}, {question.machine.name}"
    plot.draw_sweep(points, png, axis=names.get(axis, "layers"), title=title)


# -- figures --------------------------------------------------------------------------------------
def gib(nbytes: float) -> str:
    """Bytes in GiB, without the unit."""
    size = nbytes / GIB
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"


def _labelled(label: str, text: str) -> list[str]:
    head = f"  {label:<{LABEL}}"
    return _wrap(text, head, " " * len(head))


def _wrap(text: str, first: str = "", then: str = "") -> list[str]:
    return [
        part
        for number, line in enumerate(text.splitlines())
        for part in textwrap.wrap(
            line,
            WIDTH,
            initial_indent=then if number else first,
            subsequent_indent=then,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
