"""ZeRO checkpoints of several ranks: partitions are joined as DeepSpeed's own converter joins
them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stronghold.tools.cli import main
from tests.support.checkpoints import (
    BESIDE_TAGS,
    imported_session,
    make_batch,
    make_model,
    masters_of,
    session,
    snapshot,
    two_groups,
)
from tests.support.ranks import run_ranks

RANKS = 2
CASES = [(1, "bf16"), (2, "bf16"), (2, "fp32"), (3, "bf16")]


def train_one_rank(rank: int, out: str) -> None:
    """The body of each process: DeepSpeed trains and saves every case."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{out}/store", rank=rank, world_size=RANKS
    )
    import deepspeed

    # Its shared-memory kernel would be compiled for half a minute.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    for stage, precision in CASES:
        model = make_model()
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10**9,
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": precision == "bf16"},
        }
        groups = two_groups(model) if stage < 3 else model.parameters()
        engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=groups)
        for step in range(3):
            engine.backward(engine(**make_batch(RANKS * step + rank)).loss)
            engine.step()
        engine.save_checkpoint(f"{out}/{stage}{precision}")
        engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_partitions_of_two_ranks_are_joined(tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    here = "tests.border.test_checkpoint_ranks"
    code = f"import sys; from {here} import train_one_rank as f; f({{}}, {{!r}})"
    root = Path(__file__).resolve().parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(rank, str(tmp_path))],
            cwd=root,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            | {"LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu"},
        )
        for rank in range(RANKS)
    ]
    assert [process.wait() for process in processes] == [0] * RANKS
    for stage, precision in CASES:
        source, ours = (tmp_path / f"{stage}{precision}", tmp_path / f"{stage}{precision}-ours")
        assert main(["import", str(source), str(ours)]) == 0
        merged = get_fp32_state_dict_from_zero_checkpoint(str(source))
        with imported_session(make_model(seed=9), stage, precision) as engine:
            engine.load_checkpoint(ours)
            for name, master in masters_of(engine).items():
                assert torch.equal(master, merged[name].float()), (stage, precision, name)
            found = snapshot(engine)
            assert set(found["steps"].tolist()) == {3}
        if stage < 3:
            moments_agree(source / "global_step3", found)


def moments_agree(source: Path, found: dict[str, torch.Tensor]) -> None:
    """With what DeepSpeed's universal-checkpoint converter makes of the same files."""
    universal = source.parent / "universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    folders = ["--input_folder", str(source), "--output_folder", str(universal)]
    subprocess.run([*command, *folders], check=True, capture_output=True)
    keys = [key for key in found if key.startswith("moment")]
    for key in keys:
        _, which, name = key.split(" ")
        file = universal / "zero" / name / f"{('exp_avg', 'exp_avg_sq')[int(which)]}.pt"
        assert torch.equal(found[key], torch.load(file, weights_only=False)["param"].view(-1)), key
    assert len(keys) > 40


def test_our_tags_say_nothing_about_ranks(tmp_path: Path) -> None:
    """Whole tensors by name: what N ranks need is the same file."""
    with session(precision="bf16") as engine:
        engine.save_checkpoint(tmp_path, tag="before training")
        weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.load_checkpoint(tmp_path)
        for name, value in engine.module_state_dict().items():
            assert torch.equal(value, weights[name])
    names = {path.name.split("-")[0] for path in (tmp_path / "before training").iterdir()}
    assert names == {"weights", "manifest.json", "config.json", "mp_rank_00_model_states.pt"}


@pytest.mark.slow
def test_different_tags_fail_or_the_first_ranks_tag_counts(tmp_path: Path) -> None:
    """As the config's `checkpoint.tag_validation` asks."""
    run = "tests.support.rank_checkpoints:different_tags"
    for errors in run_ranks(run, 2, tmp_path / "ranks"):
        assert "the ranks give different tags: tag-0, tag-1" in errors["Fail"]
        assert errors["Warn"] == errors["Ignore"] == ""
    saved = tmp_path / "ranks"
    assert not (saved / "Fail").exists()
    for mode in ("Warn", "Ignore"):
        assert sorted(path.name for path in (saved / mode).iterdir()) == sorted(
            ["tag-0", *BESIDE_TAGS]
        )
