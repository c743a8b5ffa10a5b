"""The room of one rank (`stronghold.train`) against plain PyTorch, to the bit: a covering array of
its configurations, and random programs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import ConfigError
from stronghold.plan.cost import LEVELS
from tests import programs
from tests.laws import test_bits
from tests.laws.test_adapters import CASES
from tests.laws.test_bits import LIKE_LLAMA, STEPS, never, plain
from tests.models import HUGGING_FACE, MODELS, PLAIN
from tests.support.core import ByCore, train_core
from tests.support.insides import offload_small
from tests.support.pairs import Case, covering
from tests.support.sides import Plain
from tests.support.training import OPTIMIZERS, assert_identical

NUM_PROGRAMS, NUM_QUICK = 200, 24

# The room has no model that is whole on the device, and keeps levels as an axis of their own.
PLACES: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in place.items() if key != "activations"}
    for name, place in test_bits.PLACES.items()
    if name != "whole"
}
AXES: dict[str, list[str]] = {
    "model": [name for name in (*PLAIN, *HUGGING_FACE) if name not in LIKE_LLAMA[1:]],
    "place": list(PLACES),
    "home": ["ram", "moments", "masters", "weights"],
    "activations": [*LEVELS],
    "clipping": ["0.0", "0.5"],
    "micro-batches": ["1", "3"],
    "precision": ["fp32", "bf16", "fp16", "lean"],
    "optimizer": list(OPTIMIZERS),
    "lanes": ["on time", "late"],
}


def lanes(*, are_late: bool, seed: int = 1) -> Callable[[], EmulatedDevice]:
    jitter_s = 0.0003 if are_late else 0.0
    return functools.partial(EmulatedDevice, jitter_s=jitter_s, seed=seed)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take several pieces, and pieces several blocks on both disks."""
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 1)  # a page of each
    monkeypatch.setattr("stronghold.train.files.BLOCK_BYTES", 4096)
    monkeypatch.setattr("stronghold.train.files.UNIT_BYTES", 8192)
    offload_small(monkeypatch)


def at_home(home: str, folder: Path) -> dict[str, Any]:
    """The settings of a core some of whose arrays lie in files on two disks."""
    if home == "ram":
        return {}
    folders = [folder / "one", folder / "other"]
    for each in folders:
        each.mkdir(exist_ok=True)
    return {"folders": folders, "spill": home}


ARRAY = covering(list(AXES.values()), never)
random.Random(0).shuffle(ARRAY)  # the default run has some of all
DEFAULT = ARRAY[:60]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in DEFAULT else pytest.mark.slow) for c in ARRAY],
    ids="-".join,
)
def test_no_configuration_changes_a_bit(case: Case, tmp_path: Path) -> None:
    of = dict(zip(AXES, case, strict=True))
    options: Any = {
        "clipping": float(of["clipping"]),
        "accumulation": int(of["micro-batches"]),
        "precision": of["precision"],
        "optimizer": of["optimizer"],
    }
    expected = plain(of["model"], **options)
    run = train_core(
        MODELS[of["model"]],
        steps=STEPS,
        device=lanes(are_late=of["lanes"] == "late"),
        activations=of["activations"],
        **PLACES[of["place"]],
        **at_home(of["home"], tmp_path),
        **options,
    )
    assert_identical(run, expected)
    assert run.norms == expected.norms


# -- programs --------------------------------------------------------------------------------------
# Those of which the room has no part: checkpoints, states that leave, masters, a second engine.
ACTIONS = ["train", "odd_step", "evaluate", "boom", "throw_away", "bad", "freeze", "rate", "hook"]
ACTIONS += ["copied", "by_hand", "read", "exchange_weights", "write_parameters"]


def write_parameters(s: Any, r: random.Random) -> None:
    name, change = r.choice(list(s.named())), r.choice([programs.shrink, programs.prune])
    s.write(name, change, r.choice(["in place", "data"]))


def exchange_weights(s: Any, r: random.Random) -> None:
    """Adapters are not merged: nothing tells the room that PEFT is about to write."""
    action = programs.evaluate if s.case.model in CASES else programs.exchange
    action(s, r)


def hook(s: Any, r: random.Random) -> None:
    """None that reads another layer's weight: nothing hides a parameter while it is updated."""
    kind = "peek"
    while kind == "peek":
        state = r.getstate()
        kind = r.choice(programs.HOOKS)
    r.setstate(state)
    programs.hook(s, r)


OWN = {"hook": hook, "write_parameters": write_parameters, "exchange_weights": exchange_weights}


def drawn(seed: int) -> programs.Case:
    case = programs.drawn(seed)
    r = random.Random(seed)
    actions = tuple((r.choice(ACTIONS), r.randrange(10**6)) for _ in range(r.randrange(4, 13)))
    # Powers of two: the room leaves the division to its caller, who divides the loss. In fp16 small
    # gradients would show whether the loss or the gradients were divided.
    accumulation = {3: 4}.get(case.accumulation, case.accumulation)
    accumulation = 1 if case.precision == "fp16" else accumulation
    return replace(case, section={}, accumulation=accumulation, actions=actions)


def performed(case: programs.Case, side: Any) -> tuple[list[tuple[str, Any]], Exception | None]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    s = None
    try:
        s = side()
        torch.manual_seed(1)
        for name, seed in case.actions:
            s.say("--", (name, seed))
            (programs.ACTIONS | OWN)[name](s, random.Random(seed))
        s.say("--", "end")
        for name, value in s.weights().items():
            s.say(name, value)
        if s.norm:
            s.say("moments", s.moments())
    except Exception as error:
        return [] if s is None else s.log, error
    finally:
        if s is not None:
            s.destroy()
    return s.log, None


def judged(
    case: programs.Case,
    folder: Path,
    *,
    by: Callable[..., Any] = ByCore,
    places: dict[str, dict[str, Any]] = PLACES,
    homes: Sequence[str] = tuple(AXES["home"]),
) -> tuple[str, str]:
    expected, expected_error = performed(case, lambda: Plain(case))
    r = random.Random(case.seed)
    place = places[r.choice(list(places))]
    level, late = r.choice(LEVELS), r.random() < 0.3
    home = r.choice(homes)
    settings = {"activations": level, **place, **at_home(home, folder)}
    device = lanes(are_late=late, seed=case.seed)
    found, error = performed(case, lambda: by(case, device=device, **settings))
    action: Any = ""
    where = f"{place} {home} {level} {'late' if late else ''}"
    for (label, value), (other_label, other) in zip(found, expected, strict=False):
        action = value if label == "--" else action
        if label != other_label or not programs.same(value, other):
            return "different", f"{where} in {action}: {label}: got {value}, expected {other}"
    if isinstance(error, ConfigError):
        return "refused", f"in {action}: {error}"
    if type(error) is not type(expected_error):
        return "error", f"{where} in {action}: got {error!r}, expected {expected_error!r}"
    return "equal", ""


@pytest.mark.parametrize(
    "seed",
    [pytest.param(k, marks=() if k < NUM_QUICK else pytest.mark.slow) for k in range(NUM_PROGRAMS)],
)
def test_no_program_tells_the_room_from_plain_torch(seed: int, tmp_path: Path) -> None:
    case = drawn(seed)
    kind, why = judged(case, tmp_path)
    assert kind in ("equal", "refused"), f"{case}\n{why}"
