"""Laws of exchange with DeepSpeed: fp32 weights go both ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.utils import zero_to_fp32

from stronghold.optim.states import join_master
from tests.support import stock
from tests.support.checkpoints import make_batch, make_model, masters_of, saved_run, session
from tests.support.frameworks import plugin
from tests.support.states import adam_states

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


def test_deepspeeds_functions_read_our_checkpoints(saved: Path, plugin: None) -> None:
    merged = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(saved), lazy_mode=True)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(make_model(seed=9), str(saved))
    for name, master in torch.load(saved / "plain.pt")["masters"].items():
        assert torch.equal(merged[name].contiguous(), master), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, merged[name].to(value.dtype)), name
    with pytest.raises(FileNotFoundError, match="no_such_tag"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(saved), "no_such_tag")


def test_weights_of_deepspeeds_checkpoint_begin_a_run_of_ours(tmp_path: Path) -> None:
    """They are rounded to bf16 first, as DeepSpeed itself rounds a model's weights."""
    model = make_model()
    with stock.one_rank(tmp_path), stock.deepspeeds_engine(model, stage=2, bf16=True) as theirs:
        for step in range(2):
            theirs.backward(theirs(**make_batch(step)).loss)
            theirs.step()
        theirs.save_checkpoint(tmp_path / "theirs")
    merged = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "theirs"))
    model = make_model(seed=9)
    model.load_state_dict(merged)
    with session(model, precision="bf16") as engine:
        for name, master in masters_of(engine).items():
            assert torch.equal(master, merged[name].bfloat16().float()), name


def test_the_script_beside_the_tags_writes_fp32_weights(saved: Path, tmp_path: Path) -> None:
    run = [sys.executable, saved / "zero_to_fp32.py", saved, tmp_path]
    subprocess.run(run, check=True, cwd=tmp_path)
    merged = torch.load(tmp_path / "pytorch_model.bin")
    masters = torch.load(saved / "plain.pt")["masters"]
    for name, master in masters.items():
        assert torch.equal(merged[name], master), name
