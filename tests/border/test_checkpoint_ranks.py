"""Laws of checkpoints of several ranks: tags and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import BESIDE_TAGS, session
from tests.support.ranks import run_ranks


def test_our_tags_say_nothing_about_ranks(tmp_path: Path) -> None:
    """Whole tensors by name: what N ranks need is the same file."""
    with session(precision="bf16") as engine:
        engine.save_checkpoint(tmp_path, tag="before training")
        weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.load_checkpoint(tmp_path)
        for name, value in engine.module_state_dict().items():
            assert torch.equal(value, weights[name])
    names = {path.name.split("-")[0] for path in (tmp_path / "before training").iterdir()}
    assert names == {"layer", "manifest.json", "config.json", "mp_rank_00_model_states.pt"}


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
