"""Law 4 across formats: checkpoints as other tools open them, and as the command makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stronghold.errors import ConfigError
from stronghold.tools.cli import main
from tests.support.checkpoints import command, make_model, saved_run, session, train
from tests.support.frameworks import weights_for_accelerate
from tests.support.tiny import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_run(tmp_path_factory.mktemp("saved"))


# -- Hugging Face ---------------------------------------------------------------------------------
@pytest.mark.parametrize("size", ["5GB", "20kB"])
def test_an_export_opens_in_transformers(size: str, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command("export", saved, out, "--max-shard-size", size)
    shards = sorted(out.glob("*.safetensors"))
    assert (
        (len(shards) == 1)
        == (size == "5GB")
        == (not (out / "model.safetensors.index.json").exists())
    )
    assert "lm_head.weight" not in {name for shard in shards for name in load_file(shard)}
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = torch.load(saved / "plain.pt")["weights"]
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight is model.transformer.wte.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


def test_an_export_takes_configuration_and_tokenizer_from_a_directory(
    saved: Path, tmp_path: Path
) -> None:
    model_dir = tmp_path / "model"
    make_model().save_pretrained(model_dir)
    (model_dir / "vocab.json").write_text("{}")
    command("export", saved / "global_step4", tmp_path / "out", "--model-dir", model_dir)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "vocab.json", "model.safetensors"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_an_export_is_whole_or_not_there(saved: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for arguments, message in (
        ((saved, tmp_path / "used"), "is not empty"),
        ((saved, tmp_path / "out", "--model-dir", tmp_path / "used"), "has no config.json"),
        ((saved, tmp_path / "out", "--max-shard-size", "large"), "--max-shard-size large"),
        ((saved, tmp_path / "out", "--tag", "none"), "no such checkpoint"),
        ((tmp_path, tmp_path / "out"), "neither a checkpoint nor"),
        ((saved, tmp_path / "used" / "file" / "out"), "used/file"),
    ):
        assert main(["export", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_an_export_touches_no_name_that_it_did_not_make(saved: Path, tmp_path: Path) -> None:
    mine = tmp_path / ".model.old"
    mine.mkdir()
    (mine / "thesis.txt").write_text("the only copy")
    command("export", saved, tmp_path / "model")
    assert (mine / "thesis.txt").read_text() == "the only copy"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.old", "model"]


def test_experts_are_saved_as_they_were_loaded(tmp_path: Path) -> None:
    """The model has one tensor for all experts of a layer, its directory one for each."""
    mixtral = tiny("mixtral")
    assert mixtral is not None
    mixtral.save_pretrained(tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made").train()
    with session(model) as engine:
        train(engine, 2)
        model.save_pretrained(tmp_path / "saved")
        expected = {name: value.clone() for name, value in engine.module_state_dict().items()}
    made, saved = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("made", "saved")
    )
    assert saved.keys() == made.keys() > {"model.layers.0.block_sparse_moe.experts.0.w1.weight"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(v, expected[name]) for name, v in again.state_dict().items())


def test_a_meta_model_is_refused() -> None:
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(ConfigError, match="is on the meta device: load its values"), session(model):
        pass


# -- weights alone --------------------------------------------------------------------------------
def test_save_16bit_model_writes_what_torch_and_safetensors_read(tmp_path: Path) -> None:
    with session(precision="bf16", section={"resident_layers": 1}) as engine:
        train(engine, 3)
        assert engine.save_16bit_model(tmp_path) is True
        assert engine.save_16bit_model(tmp_path, "model.safetensors") is True
        expected = {name: value.clone() for name, value in engine.module_state_dict().items()}
        total = sum(p.numel() * 2 for p in engine.module.parameters())
        live = weights_for_accelerate(engine)
        assert {v.untyped_storage().nbytes() == v.numel() * 2 for v in live.values()} == {True}
        assert live["lm_head.weight"] is live["transformer.wte.weight"]
        train(engine, 3)
    read = torch.load(tmp_path / "pytorch_model.bin")
    assert list(read) == list(expected)
    for name, value in read.items():
        assert torch.equal(value, expected[name])
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 1.5 * total
    assert read["lm_head.weight"].data_ptr() == read["transformer.wte.weight"].data_ptr()
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(value, expected[name]) for name, value in tensors.items())
    assert len(list(tmp_path.iterdir())) == 2


def test_transformers_saves_the_live_weights_with_their_ties(tmp_path: Path) -> None:
    with session(precision="bf16") as engine:
        train(engine, 2)
        state = weights_for_accelerate(engine, tensor_parallel=True)
        engine.module.save_pretrained(tmp_path, state_dict=dict(state))
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name])
