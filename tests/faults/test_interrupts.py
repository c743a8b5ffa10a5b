"""Ctrl-C at any moment, then the checkpoint on the same engine: the losses of a run that nobody
interrupted. Ctrl-C while chunks run: the block is the user's, and whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import children
from tests.support.checkpoints import assert_same, resume, session, snapshot
from tests.support.checkpoints import train as train_steps
from tests.support.interrupts import Stopped, at_bytecode
from tests.support.training import config, initialized

PROGRAM = """
import faulthandler
from tests.support.interrupts import main
faulthandler.enable()
faulthandler.dump_traceback_later(180, exit=True)  # it hangs
main()
"""


def interrupt(folder: Path, first: int, count: int) -> None:
    """These seeds of `tests.support.interrupts`, in a process of their own, which may hang."""
    with (folder / "said").open("w+") as said:
        status, errors = children.run(PROGRAM, folder, first, count, folder=folder, stdout=said)
    text = (folder / "said").read_text()
    lines = [line for line in text.splitlines() if line.startswith("seed ")]
    assert status == 0, f"{lines[-1:]}\n{errors[-6000:]}"
    assert len(lines) == count
    landed = [line for line in lines if "nothing" not in line]
    assert len(landed) > count // 2, "most came too late to interrupt anything"


def test_an_interrupt_leaves_nothing_that_a_load_does_not_heal(tmp_path: Path) -> None:
    interrupt(tmp_path, 3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_two_hundred_interrupts_leave_nothing(first: int, tmp_path: Path) -> None:
    interrupt(tmp_path, first, 20)


@pytest.mark.parametrize(
    ("file", "stride"),
    [
        ("chunks", 7),
        ("chunk_effects", 61),
        pytest.param("chunks", 1, marks=pytest.mark.slow),
        pytest.param("chunk_effects", 7, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_while_a_chunk_runs_leaves_the_block_as_it_was(file: str, stride: int) -> None:
    """At bytecodes of what gives a block views of its parameters, lets its hooks wait, and tries
    it; and of what takes this back."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    section = {"chunk": 1, "window": 1, "layers": ["0", "1"]}
    engine = initialized(model, config(section=section))
    x, within = torch.randn(2, 4), f"/stronghold/train/{file}.py"
    model[0][1].register_forward_hook(lambda module, args, output: None)

    def state() -> list[Any]:
        hooks = [*model[0][1]._forward_hooks.values()]
        return [*hooks, *(part.training for part in model.modules())]

    def work() -> Tensor:
        engine._job.trainer._hooks._chunks._shared.clear()  # its blocks are tried anew
        output: Tensor = engine(x)
        return output

    expected, before = work(), state()
    count = at_bytecode(work, 0, within=within)
    for number in range(1, count + 1, stride):
        with pytest.raises(Stopped):
            at_bytecode(work, number, within=within)
        kinds = [type(p) for part in model.modules() for p in part.parameters(recurse=False)]
        assert all(issubclass(kind, nn.Parameter) for kind in kinds), f"bytecode {number}"
        assert state() == before, f"bytecode {number}"
    assert torch.equal(work(), expected)
    engine.destroy()


def without_chance(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot without random states, which a forward changes."""
    return {name: value for name, value in state.items() if "random" not in name}


def arrays_of(engine: Any) -> dict[str, Tensor]:
    """A snapshot of the engine's arrays."""
    return without_chance(snapshot(engine))


# Primes: each instruction of a loop has its turn.
@pytest.mark.parametrize("stride", [41, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", ["early_updates", pytest.param("arrays", marks=pytest.mark.slow)])
def test_an_interrupt_between_early_update_and_commit_leaves_one_step_or_says_so(
    file: str, stride: int, tmp_path: Path
) -> None:
    """At bytecodes that start, take back and commit early updates. The arrays are those of before
    the step, or the engine asks for a load, which heals it."""
    section = {"window": 2, "early_layers": "all"}
    with session(clipping=1e4, section=section) as engine:
        first = train_steps(engine, 2)
        engine.save_checkpoint(tmp_path)
        before = snapshot(engine)
        expected = train_steps(engine, 1)
        resume(engine, tmp_path)
        assert_same(snapshot(engine), before)  # as after each interrupt
        within = f"/stronghold/train/{file}.py"
        work = lambda: train_steps(engine, 1)  # noqa: E731
        count = at_bytecode(work, 0, within=within)
        assert len(first) == 2
        assert count > 100
        resume(engine, tmp_path)
        num_torn = num_stopped = 0
        for number in range(1, count + 1, stride):
            try:
                at_bytecode(work, number, within=within)
            except Stopped:
                num_stopped += 1
            # the lanes' time decides which branches a step takes: it had fewer bytecodes
            else:
                resume(engine, tmp_path)
                continue
            if engine.inspect().unfinished is None:
                assert_same(arrays_of(engine), without_chance(before))
            else:
                num_torn += 1
            resume(engine, tmp_path)
            assert_same(snapshot(engine), before)
        assert 0 < num_torn < num_stopped
        assert num_stopped > count // stride // 2
        assert all(map(torch.equal, train_steps(engine, 1), expected))
