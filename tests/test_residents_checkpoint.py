"""A checkpoint is resumed wherever layers stay and are updated."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.checkpoint import save
from tests.checkpoints import assert_same, make_model, session, snapshot
from tests.checkpoints import train as train_session
from tests.places import CHECKPOINTED, ON_GPU, assert_resumed_through, on_gpu


@pytest.mark.parametrize("options", CHECKPOINTED, ids=str)
def test_a_checkpoint_is_resumed_wherever_layers_are(
    options: dict[str, Any], tmp_path: Path
) -> None:
    places = [{"window": 1}, *map(on_gpu, ON_GPU), {"window": 2}]
    assert_resumed_through(places, tmp_path, {}, **options)


@pytest.mark.parametrize("place", ["half", "whole"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_the_next_update_waits_for_a_save_beside_it(
    clipping: float, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"precision": "bf16", "clipping": clipping}
    with session(section=on_gpu(place), **options) as engine:
        train_session(engine, 2)
        engine.save_checkpoint(tmp_path / "stopped")
        losses = train_session(engine, 3)
    write = save.Save._write_layer

    def slow(self: Any, index: int) -> None:
        time.sleep(0.02)  # training has time to overtake a save that nothing holds back
        write(self, index)

    monkeypatch.setattr(save.Save, "_write_layer", slow)
    with session(section=on_gpu(place, async_checkpoint=True), **options) as engine:
        train_session(engine, 2)
        engine.save_checkpoint(tmp_path / "beside")
        assert all(map(torch.equal, train_session(engine, 3), losses))
    files = sorted((tmp_path / "stopped" / "global_step2").glob("*.safetensors"))
    assert len(files) > 10
    for file in files:
        assert file.read_bytes() == (tmp_path / "beside" / "global_step2" / file.name).read_bytes()


@pytest.mark.parametrize("place", ["embedding and head", "every layer", "whole"])
def test_loaded_weights_are_the_new_masters(place: str) -> None:
    """state_dict, load_state_dict and the consolidated weights of savers, between steps."""
    runs = []
    for section in ({"window": 1}, on_gpu(place)):
        with session(precision="bf16", section=section) as engine:
            train_session(engine, 4)
            assert any(state.low.any() for state in engine._stack.host.layers)
            new = {name: value / 2 for name, value in make_model(seed=7).state_dict().items()}
            engine.module.load_state_dict(new)
            train_session(engine, 2)
            live = engine._zero3_consolidated_16bit_state_dict()
            for name, value in engine.module.state_dict().items():
                assert torch.equal(live[name], value), name
            runs.append(snapshot(engine))
    assert_same(*runs)
