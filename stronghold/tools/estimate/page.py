"""An estimate as one page of text, and several as a table.

Owns the words and the layout. The command prints them.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from stronghold.tools.estimate.estimate import Estimate, seconds

WIDTH = 100
GIB = float(1 << 30)
LABEL = 12
SAME = 0.005  # a step that changes by less is the same


def page(estimate: Estimate, *, config_path: str | None = None) -> str:
    """The text. `config_path` names the file of the config; None prints the config."""
    blocks = [_head(estimate)]
    if estimate.refusal is not None:
        blocks.append(_wrap(estimate.refusal))
    blocks.append([line for note in estimate.notes for line in _wrap(f"note: {note}")])
    blocks.append(_memory(estimate))
    reasons = [line for reason in estimate.reasons for line in _wrap(reason, "  ", "    ")]
    blocks.append(["Plan", *reasons] if reasons else [])
    if estimate.fits:
        blocks.append(_prediction(estimate))
    blocks += [_limit(estimate), _gains(estimate)]
    if config_path is not None and estimate.config is not None:
        blocks.append([f"The config is in {config_path}"])
    elif estimate.config is not None:
        text = textwrap.indent(config_text(estimate.config), "  ")
        blocks.append(["Config", *text.splitlines()])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def table(points: Mapping[int, Estimate], axis: str) -> str:
    """One line per estimate, by its value on this axis."""
    lines = [f"{axis:>9}  {'step':>9}  {'tokens/s':>9}  {'limit':>9}  bound"]
    for value, point in points.items():
        line = f"{value:>9,}  does not fit"
        if point.fits:
            line = f"{value:>9,}  {seconds(point.step_s):>9}  {point.tokens_per_s:>9,.0f}  "
            line += f"{seconds(point.limits.seconds):>9}  {point.bound}"
        lines.append(line)
    return "\n".join(lines)


def _head(estimate: Estimate) -> list[str]:
    asked = estimate.question
    steps = f" x {asked.accumulation} micro-batches" if asked.accumulation > 1 else ""
    if asked.chunk is not None:
        steps = f" in chunks of {asked.chunk}{steps}"
    ranks = f" x {asked.gpus} ranks" if asked.gpus > 1 else ""
    ranks += f" x {asked.nodes} nodes" if asked.nodes > 1 else ""
    clipping = f"clipped at {asked.clipping:g}" if asked.clipping else "no clipping"
    states = "" if asked.states == "exact" else f" with {asked.states} states"
    model = asked.model
    sizes = f"{model.layout.num_parameters / 1e9:.3g} B parameters in {model.num_blocks} blocks"
    num_trained = model.layout.num_trained
    if num_trained < model.layout.num_parameters:
        sizes += f", of which {num_trained / 1e9:.3g} B train"
    return [
        *_wrap(f"{model.name}: {sizes}"),
        f"{asked.dtype}{states}, batch {asked.batch} x {asked.seq} tokens{steps}{ranks} = "
        f"{asked.tokens:,} tokens per step, {clipping}",
        f"on {asked.machine.name}",
        "",
        "FITS" if estimate.fits else "DOES NOT FIT",
    ]


def _memory(estimate: Estimate) -> list[str]:
    lines = ["Memory"] if estimate.tiers else []
    for name, (budget, sizes) in estimate.tiers.items():
        planned = sum(sizes.values())
        share = planned / budget if budget else 0.0
        parts = ", ".join(f"{part} {gib(size)}" for part, size in sizes.items() if size)
        figure = f"{gib(planned)} of {gib(budget)} GiB ({share:.0%})"
        lines += _labelled(name, f"{figure}: {parts}" if parts else figure)
    return lines


def _prediction(estimate: Estimate) -> list[str]:
    first, *others = estimate.shares.items() or [("nothing", 0.0)]
    bound = f"{first[0]}, {first[1]:.0%} of the step"
    rest = ", ".join(f"{name} {share:.0%}" for name, share in others if share >= SAME)
    busy = ", ".join(
        f"{lane} {share:.0%}" for lane, share in estimate.busy.items() if share >= SAME
    )
    kinds = ", ".join(
        f"{kind} {seconds(value)}"
        for kind, value in estimate.compute.items()
        if value >= SAME * estimate.step_s
    )
    return [
        "Prediction",
        *_labelled("step", f"{seconds(estimate.step_s)}, {estimate.tokens_per_s:,.0f} tokens/s"),
        *_labelled("bound", f"{bound}; then {rest}" if rest else bound),
        *(_labelled("lanes busy", busy) if busy else []),
        *(_labelled("compute", kinds) if kinds else []),
    ]


def _limit(estimate: Estimate) -> list[str]:
    limits, distance = estimate.limits, ""
    if estimate.fits and estimate.step_s > 0.0:
        distance = f"; the plan reaches {limits.seconds / estimate.step_s:.0%} of it"
    tokens = estimate.question.tokens / limits.seconds if limits.seconds > 0.0 else 0.0
    descending = sorted(limits.parts.items(), key=itemgetter(1), reverse=True)
    parts = ", ".join(f"{name} {seconds(value)}" for name, value in descending if value > 0.0)
    if limits.fill_s > 0.0:
        parts += f"; one layer's way in and out {seconds(limits.fill_s)}"
    return [
        "Physical limit",
        *_labelled("step", f"{seconds(limits.seconds)}, {tokens:,.0f} tokens/s{distance}"),
        *_labelled("set by", limits.bound),
        *_labelled("resources", parts),
    ]


def _gains(estimate: Estimate) -> list[str]:
    if not estimate.gains:
        return []
    width = max(LABEL, *(len(change) for change, _ in estimate.gains))
    rows = [f"  {change:<{width}}  {_gain(gain, estimate)}" for change, gain in estimate.gains]
    return ["What more would buy", *rows]


def _gain(gain: Estimate | None, estimate: Estimate) -> str:
    if gain is None:
        return "does not fit"
    speed = f"{gain.tokens_per_s:,.0f} tokens/s, step {seconds(gain.step_s)}"
    if not estimate.fits:
        return f"fits: {speed}"
    change = gain.tokens_per_s / estimate.tokens_per_s - 1
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
