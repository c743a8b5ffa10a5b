"""Law 4 for parameters of several dtypes: checkpoints resume in every place, cross the key
`stronghold.dtypes`, and open in other tools; DeepSpeed's functions read and write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stronghold.checkpoint import export
from stronghold.checkpoint.export import locate
from stronghold.optim.states import split_master
from tests.models import loss_of
from tests.support.checkpoints import command, masters_of
from tests.support.mixed import MIXED, token_batch
from tests.support.training import DTYPES, config, initialized, moments_of

PLACES: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1},
    "moments in files": {"window": 2, "nvme": {"spill": "moments"}},
    "all in files": {"window": 1, "nvme": {"spill": "weights"}},
    "one resident": {"window": 2, "resident_layers": 1},
    "updated on the gpu": {"resident_layers": "all", "resident_updates": "gpu"},
}


@contextmanager
def session(
    name: str,
    folder: Path,
    place: str = "one slot",
    *,
    seed: int = 0,
    rule: str = "own",
    **more: Any,
) -> Iterator[Any]:
    """An engine over a fresh model of several dtypes."""
    precision = more.get("precision", "bf16")
    section = {**PLACES[place], "dtypes": rule}
    if "nvme" in section:
        section["nvme"] = {**section["nvme"], "path": str(folder)}
    model, _ = MIXED[name](DTYPES[precision])(seed=seed)
    engine = initialized(
        model, config(section=section, **{"clipping": 0.5, "precision": "bf16", **more})
    )
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, steps: int) -> list[torch.Tensor]:
    """The losses of the next steps, from the engine's position on."""
    losses = []
    for _ in range(steps):
        loss = loss_of(engine(**token_batch(engine.micro_steps)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Weights, masters and moments."""
    engine.synchronize()
    found = {f"weight {k}": v.cpu().clone() for k, v in engine.module_state_dict().items()}
    found |= {f"master {k}": v for k, v in masters_of(engine).items()}
    moments = moments_of(engine)
    return found | {f"moment {i} {k}": m for k, v in moments.items() for i, m in enumerate(v)}


def counts_of(engine: Any) -> dict[str, int]:
    """Updates of each trained parameter. Two dtypes of a block may lie in two layers."""
    return {
        name: count
        for layer in engine.inspect().layers
        for name, count in zip(layer.trained, layer.counts, strict=True)
    }


# -- across the key --------------------------------------------------------------------------------
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "precision"), [("lora", "bf16"), ("t5", "bf16"), ("odd", "bf16"), ("odd", "fp16")]
)
@pytest.mark.parametrize("place", ["one slot", "all in files", "updated on the gpu"])
def test_masters_cross_the_key_without_a_change_of_value(
    name: str, precision: str, place: str, tmp_path: Path
) -> None:
    """Exact states hold an fp32 master of every dtype. A trained weight is that master, rounded to
    the dtype of this engine; a frozen one is rounded from the other engine's weight."""
    values: dict[str, Any] = {}
    for rule, other in (("cast", "own"), ("own", "cast")):
        with session(name, tmp_path, rule=rule, precision=precision) as engine:
            train(engine, 2)
            engine.save_checkpoint(tmp_path / rule)
            values = state_of(engine)
            steps = counts_of(engine)
            trained = set(masters_of(engine))
        with session(name, tmp_path, place, seed=1, rule=other, precision=precision) as engine:
            engine.load_checkpoint(tmp_path / rule)
            found = state_of(engine)
            assert counts_of(engine) == steps
            dtypes = {n: p.dtype for n, p in engine.module.named_parameters()}
            losses = train(engine, 2)
        for key, value in values.items():
            kind, _, of = key.partition(" ")
            if kind != "weight":
                assert torch.equal(found[key], value), key
            elif of in trained:
                weights, _ = split_master(values[f"master {of}"].flatten(), dtypes[of])
                assert torch.equal(found[key].flatten(), weights), key
            elif of in dtypes:
                assert torch.equal(found[key], value.to(dtypes[of])), key
        assert all(loss.isfinite() for loss in losses)
        if name != "t5":
            assert len(set(dtypes.values())) == (2 if other == "own" else 1)


@pytest.mark.parametrize(("rule", "other"), [("cast", "own"), ("own", "cast")])
def test_lean_states_cross_the_key_rounded_to_their_24_bits(
    rule: str, other: str, tmp_path: Path
) -> None:
    """A master within 2^-16 of its value where an fp32 parameter becomes a lean one."""
    with session("lora", tmp_path, rule=rule, precision="lean") as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        values = masters_of(engine)
    with session("lora", tmp_path, seed=1, rule=other, precision="lean") as engine:
        engine.load_checkpoint(tmp_path / "saved")
        found = masters_of(engine)
        train(engine, 1)
    for name, value in values.items():
        if other == "own":
            assert torch.equal(found[name], value), name
        else:
            assert not torch.equal(found[name], value), name
            assert torch.allclose(found[name], value, rtol=2**-16, atol=0.0), name


@pytest.mark.parametrize(("rule", "other"), [("cast", "own"), ("own", "cast")])
def test_weights_alone_cross_the_key_by_value(rule: str, other: str, tmp_path: Path) -> None:
    with session("lora", tmp_path, rule=rule) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        saved = {k: v.clone() for k, v in engine.module_state_dict().items()}
    with session("lora", tmp_path, seed=1, rule=other) as engine:
        engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
        for name, value in engine.module_state_dict().items():
            assert torch.equal(value, saved[name].to(value.dtype)), name
        for name, master in masters_of(engine).items():
            assert torch.equal(master, engine.module_state_dict()[name].float()), name


# -- exports ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["bf16", "lean"])
def test_exports_have_every_parameter_in_its_own_dtype_and_every_master(
    precision: str, tmp_path: Path
) -> None:
    with session("ernie", tmp_path, precision=precision) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        state, masters = engine.module_state_dict(), masters_of(engine)
        weights = {name: value.clone() for name, value in state.items()}
        engine.save_16bit_model(tmp_path / "plain", "model.safetensors")
        model = type(engine.module)
    command("export", tmp_path / "saved", tmp_path / "hf")
    for written in (tmp_path / "hf" / "model.safetensors", tmp_path / "plain/model.safetensors"):
        for name, value in load_file(written).items():
            assert value.dtype is weights[name].dtype, name
            assert torch.equal(value, weights[name]), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    opened = model.from_pretrained(tmp_path / "hf", dtype="auto")
    for name, value in opened.state_dict().items():
        assert value.dtype is weights[name].dtype, name
        assert torch.equal(value, weights[name]), name
    fp32 = export.fp32_state(locate(tmp_path / "saved", None))
    assert all(torch.equal(fp32[name], value) for name, value in masters.items())
