"""Laws of exchange with DeepSpeed: its checkpoints are imported bit for bit, and train on there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.utils import zero_to_fp32
from safetensors.torch import load_file, save_model

from stronghold.optim.states import join_master
from stronghold.tools.cli import main
from tests.support import stock
from tests.support.checkpoints import (
    command,
    imported_session,
    make_batch,
    make_model,
    masters_of,
    saved_run,
    session,
    snapshot,
    train,
    two_groups,
)
from tests.support.frameworks import plugin
from tests.support.states import adam_states
from tests.support.stock import one_rank

__all__ = ["plugin"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_run(tmp_path_factory.mktemp("saved"))


def test_a_master_survives_its_split_bit_for_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.4e38, 1e-45, float("inf"), -float("inf")])
    master = torch.cat([edges, bits.view(torch.float32)])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        again = join_master(*adam_states(dtype).split(master))
        nan = master.isnan()
        assert torch.equal(again.isnan(), nan)
        assert torch.equal(again[~nan].view(torch.int32), master[~nan].view(torch.int32))
    # but for ties, which are rounded to even there alone
    ordinary = torch.randn(1 << 12)
    ordinary = ordinary[ordinary.view(torch.int32) & 0xFFFF != 0x8000]
    weights, _ = adam_states(torch.bfloat16).split(ordinary)
    assert torch.equal(weights, ordinary.bfloat16())


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("gloo")):
        yield


@contextmanager
def deepspeeds_engine(stage: int, precision: str, seed: int = 0, frozen: bool = False) -> Any:
    model = make_model(seed=seed)
    if frozen:
        freeze(model)
    groups = two_groups(model) if 0 < stage < 3 else None
    bf16 = precision == "bf16"
    with stock.deepspeeds_engine(model, stage=stage, bf16=bf16, groups=groups) as engine:
        torch.manual_seed(1)
        yield engine


def freeze(model: torch.nn.Module) -> None:
    for parameter in model.transformer.h[1].mlp.parameters():
        parameter.requires_grad = False


def deepspeed_train(engine: Any, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        loss = engine(**make_batch(engine.micro_steps)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


CASES = [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (2, "fp32"), (3, "bf16")]


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_a_checkpoint_of_deepspeeds_is_imported_bit_for_bit(
    stage: int, precision: str, tmp_path: Path, gloo: None, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = stage in (1, 2)
    with deepspeeds_engine(stage, precision, frozen=frozen) as theirs:
        deepspeed_train(theirs, 3)
        theirs.save_checkpoint(tmp_path / "theirs", client_state={"epoch": 7})
        expected = {0: states_0, 3: states_3}.get(stage, states_2)(theirs)
    command("import", tmp_path / "theirs", tmp_path / "ours")
    # DeepSpeed's own types need none
    assert "code of its own may run" not in caplog.text
    model = make_model(seed=9)
    if frozen:
        freeze(model)
    with imported_session(model, stage, precision) as engine:
        _, client = engine.load_checkpoint(tmp_path / "ours")
        assert client["epoch"] == 7
        assert (engine.global_steps, engine.micro_steps) == (3, 3)
        masters, moments = masters_of(engine), snapshot(engine)
        for name, (master, first, second) in expected.items():
            assert torch.equal(masters[name].view(-1), master), name
            assert torch.equal(moments[f"moment 0 {name}"], first), name
            assert torch.equal(moments[f"moment 1 {name}"], second), name
        assert expected.keys() == masters.keys()
        # Its optimizer for 16-bit stage 0 counts the step that makes its states, too.
        counted = 4 if (stage, precision) == (0, "bf16") else 3
        assert set(moments["steps"].tolist()) <= {0, counted}
        train(engine, 1)


MOMENTS = ("exp_avg", "exp_avg_sq")


def states_0(theirs: Any) -> dict[str, list[torch.Tensor]]:
    """Master and moments of each parameter, flat, as DeepSpeed's live optimizer has them."""
    optimizer = theirs.optimizer
    named = dict(theirs.module.named_parameters())
    groups = getattr(optimizer, "fp32_groups", None)  # 16-bit training's masters
    masters = groups[0] if groups else list(named.values())
    state = getattr(optimizer, "optimizer", optimizer).state
    return {
        name: [v.detach().clone().view(-1) for v in (p, *(state[p][m] for m in MOMENTS))]
        for name, p in zip(named, masters, strict=True)
    }


def states_2(theirs: Any) -> dict[str, list[torch.Tensor]]:
    """Of one rank: each flat master has a group's parameters one after the other."""
    optimizer, found = theirs.optimizer, {}
    names = {parameter: name for name, parameter in theirs.module.named_parameters()}
    flats = optimizer.single_partition_of_fp32_groups
    for flat, parameters in zip(flats, optimizer.bit16_groups, strict=True):
        state = optimizer.optimizer.state[flat]
        states = [values.detach() for values in (flat, *(state[m] for m in MOMENTS))]
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            found[names[parameter]] = [values[begin:end].clone() for values in states]
            begin = end
    return found


def states_3(theirs: Any) -> dict[str, list[torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        name: [
            safe_get_full_fp32_param(parameter).clone().view(-1),
            *(safe_get_full_optimizer_state(parameter, m).clone().view(-1) for m in MOMENTS),
        ]
        for name, parameter in theirs.module.named_parameters()
    }


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_deepspeed_trains_on_from_our_export(precision: str, tmp_path: Path, gloo: None) -> None:
    model = make_model()
    freeze(model)
    with imported_session(model, 2, precision) as ours:
        train(ours, 3)
        ours.save_checkpoint(tmp_path / "ours", client_state={"epoch": 3})
        masters = masters_of(ours)
        state = torch.get_rng_state()
        losses = train(ours, 3)
    command("export", tmp_path / "ours", tmp_path / "zero", "--to", "zero-stage2")
    with deepspeeds_engine(2, precision, seed=9, frozen=True) as theirs:
        path, client = theirs.load_checkpoint(tmp_path / "zero")
        assert path is not None
        assert client["epoch"] == 3
        assert theirs.global_steps == 3
        for group, saved_group in zip(theirs.optimizer.param_groups, (0.1, 0.0), strict=True):
            assert group["weight_decay"] == saved_group
        theirs.micro_steps = 3
        torch.set_rng_state(state)
        # The same fp32 masters and moments; afterwards torch's Adam rounds otherwise than ours.
        continued = deepspeed_train(theirs, 3)
        assert torch.equal(continued[0], losses[0])
        assert torch.allclose(
            torch.stack(continued).float(), torch.stack(losses).float(), rtol=1e-2
        )
    merged = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "zero"))
    assert merged["lm_head.weight"].shape == merged["transformer.wte.weight"].shape
    for name, master in masters.items():
        assert torch.equal(merged[name].float(), master), name


def test_a_zero_export_comes_back_bit_for_bit(saved: Path, tmp_path: Path) -> None:
    command("export", saved, tmp_path / "zero", "--to", "zero-stage2")
    command("import", tmp_path / "zero", tmp_path / "again")
    with session(make_model(seed=9), precision="bf16") as engine:
        _, client = engine.load_checkpoint(tmp_path / "again")
        assert client["epoch"] == 1
        for name, master in torch.load(saved / "plain.pt")["masters"].items():
            assert torch.equal(masters_of(engine)[name], master)
        again = snapshot(engine)
        engine.load_checkpoint(saved)
        loaded = snapshot(engine)
    for name, value in loaded.items():
        assert name == "torch's random state" or torch.equal(value, again[name]), name


def test_a_loss_scale_goes_to_deepspeed_and_comes_back(tmp_path: Path) -> None:
    with imported_session(make_model(), 2, "fp16") as engine:
        train(engine, 2)
        engine.optimizer.loss_scaler.update_scale(True)
        scale = vars(engine.optimizer.loss_scaler).copy()
        engine.save_checkpoint(tmp_path / "ours")
    command("export", tmp_path / "ours", tmp_path / "zero", "--to", "zero-stage2")
    (file,) = (tmp_path / "zero").glob("*/*_optim_states.pt")
    state = torch.load(file, weights_only=False)["optimizer_state_dict"]
    assert type(state["loss_scaler"]) is DynamicLossScaler
    assert vars(state["loss_scaler"]) == scale
    assert state["dynamic_loss_scale"] is True
    command("import", tmp_path / "zero", tmp_path / "again")
    with imported_session(make_model(seed=9), 2, "fp16") as engine:
        assert vars(engine.optimizer.loss_scaler) != scale
        engine.load_checkpoint(tmp_path / "again")
        assert vars(engine.optimizer.loss_scaler) == scale


def test_deepspeeds_functions_read_our_checkpoints(saved: Path, plugin: None) -> None:
    merged = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(saved), lazy_mode=True)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(make_model(seed=9), str(saved))
    for name, master in torch.load(saved / "plain.pt")["masters"].items():
        assert torch.equal(merged[name].contiguous(), master), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, merged[name].to(value.dtype)), name
    with pytest.raises(FileNotFoundError, match="no_such_tag"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(saved), "no_such_tag")


def test_the_script_beside_the_tags_writes_fp32_weights(saved: Path, tmp_path: Path) -> None:
    run = [sys.executable, saved / "zero_to_fp32.py", saved, tmp_path]
    subprocess.run(run, check=True, cwd=tmp_path)
    merged = torch.load(tmp_path / "pytorch_model.bin")
    masters = torch.load(saved / "plain.pt")["masters"]
    for name, master in masters.items():
        assert torch.equal(merged[name], master), name


@pytest.mark.slow
def test_the_installed_converters_read_our_export(saved: Path, tmp_path: Path) -> None:
    command("export", saved, tmp_path / "zero", "--to", "zero-stage2")
    masters = torch.load(saved / "plain.pt")["masters"]
    run = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32"]
    subprocess.run([*run, tmp_path / "zero", tmp_path / "fp32"], check=True)
    merged: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "fp32").iterdir():
        merged |= torch.load(file) if file.suffix == ".bin" else load_file(file)
    run = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    folders = ["--input_folder", tmp_path / "zero" / "global_step4", "--output_folder"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run([*run, *folders, tmp_path / "universal", *workers], check=True)
    for name, master in masters.items():
        assert torch.equal(merged[name], master)
        file = tmp_path / "universal" / "zero" / name / "fp32.pt"
        assert torch.equal(torch.load(file, weights_only=False)["param"].view(-1), master.view(-1))


def test_what_is_no_zero_checkpoint_is_refused(saved: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "tag").mkdir()
    (tmp_path / "latest").write_text("tag")
    for name, data, message in (
        ("notes", b"", "has no mp_rank_00_model_states.pt"),
        ("mp_rank_00_model_states.pt", b"not a pickle", "mp_rank_00_model_states.pt: "),
    ):
        (tmp_path / "tag" / name).write_bytes(data)
        assert main(["import", str(tmp_path), str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    torch.save({"module": {}, "optimizer": None, "buffer_names": []}, tmp_path / "tag" / name)
    assert main(["import", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "no optimizer state" in capsys.readouterr().err
    (tmp_path / "tag" / "zero").mkdir()  # as ds_to_universal writes it
    assert main(["import", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "a universal checkpoint; import" in capsys.readouterr().err
    save_model(make_model(), str(tmp_path / "tag" / "model.safetensors"))
    assert not (tmp_path / "out").exists()
