"""Reading the config and our section: what is accepted, and errors that say what to change."""

from __future__ import annotations

import argparse
import base64
import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as deepspeed_config

from stronghold import config as configs
from stronghold.config import source
from stronghold.config.section import EmulatedConfig, StrongholdConfig
from stronghold.errors import ConfigError
from stronghold.model.layout import ModelLayout
from stronghold.train.demand import pinned_activations
from tests.support.layouts import layer_of_sizes
from tests.support.settings import BASE, LOGGER, load, refusal


def section_refusal(**section: Any) -> str:
    return refusal({**BASE, "stronghold": section})


def write(folder: Path, text: str) -> Path:
    path = folder / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    return path


# -- where the config comes from ------------------------------------------------------------------


def test_every_source_gives_the_same_config(tmp_path: Path) -> None:
    config = {**BASE, "stronghold": {"window": 2}}
    path = write(tmp_path, json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    args = argparse.Namespace(deepspeed_config=str(path))
    older = argparse.Namespace(deepspeed_config=None, deepscale_config=str(path))
    for given in (config, path, str(path), encoded):
        assert configs.read_config(given) == config
    assert configs.read_config(None, args) == config
    assert configs.read_config(None, older) == config


def test_the_callers_dict_is_never_changed_nor_shared() -> None:
    config = {
        **BASE,
        "stronghold": {"gpu_memory": "1GB"},
        "optimizer": {"type": "Adam", "params": {}},
    }
    before = copy.deepcopy(config)
    settings = configs.load(config)
    settings.original["optimizer"]["params"]["lr"] = 1.0
    assert config == before
    assert settings.original["stronghold"] == before["stronghold"]


def test_two_configs_are_refused() -> None:
    args = argparse.Namespace(deepspeed_config="a.json")
    with pytest.raises(ConfigError, match="two configs"):
        configs.read_config(BASE, args)


@pytest.mark.parametrize(
    "args", [None, argparse.Namespace(), argparse.Namespace(deepspeed_config=None)]
)
def test_no_config_is_refused(args: Any) -> None:
    with pytest.raises(ConfigError, match="no config"):
        configs.read_config(None, args)


def test_a_file_reads_as_deepspeed_reads_it(tmp_path: Path) -> None:
    text = """{
      # a comment
      "train_batch_size": 1, // another
      "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 3e-5}},
    }"""
    path = write(tmp_path, text)
    theirs = deepspeed_config.DeepSpeedConfig(str(path))
    scheduler = {"type": theirs.scheduler_name, "params": theirs.scheduler_params}
    read = {"train_batch_size": theirs.train_batch_size, "scheduler": scheduler}
    assert configs.read_config(path) == read
    assert read["scheduler"] == {"type": "WarmupLR", "params": {"warmup_min_lr": 3e-5}}


def test_a_missing_file_names_its_nearest_neighbour(tmp_path: Path) -> None:
    path = write(tmp_path, "{}")
    with pytest.raises(ConfigError, match=r'No such file .*Did you mean "ds_config.json"\?'):
        configs.read_config(path.with_name("ds_confg.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": tru}', "line 2 column 7"),
        ('{"a": 1\n "b": 2 "c": 3}', "line 2 column 2"),
        ('{"a": 1', "line 1 column 8"),
        ("hello", "got str, expected an object"),
        ('{\n  # fine\n  "a": [1,\n}', "line 4 column 1"),
        ("[1, 2]", r"got list, expected an object"),
        ("[" * 100_000, "recursion"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', r"Duplicate keys .*'c'"),
    ],
    ids=range(8),
)
def test_a_bad_file_says_where_it_is_bad(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        configs.read_config(path)
    assert str(path) in str(caught.value)


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b'{"a": "\xff\xfe"}')
    for given, said in (
        (tmp_path, "Is a directory"),
        (tmp_path / "binary.json", "utf-8"),
        ('{"a": 1}', "No such file"),
        ("x" * 5000, "name too long"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(ConfigError, match=rf"config file .* cannot be read: .*{said}"):
            configs.read_config(given)
    with pytest.raises(ConfigError, match="got int, expected a path"):
        configs.read_config(3)  # type: ignore[arg-type]


# -- whether the section asks for us --------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "enabled"),
    [
        ({}, False),
        ({"stronghold": {}}, True),
        ({"stronghold": {"enabled": True}}, True),
        ({"stronghold": {"enabled": False}}, False),
        ({"stronghold": {"enabled": None, "window": 2}}, True),
        ({"stronghold": {"enabled": "auto"}}, True),
        ({"stronghold": True}, True),
        ({"stronghold": False}, False),
        ({"stronghold": None}, False),
        ({"stronghold": "auto"}, False),
    ],
)
def test_the_section_alone_selects_the_engine(config: dict[str, Any], enabled: bool) -> None:
    assert configs.section_enabled(config) is enabled


@pytest.mark.parametrize("section", [3, "yes", [], {"enabled": "yes"}, {"enabled": 1}])
def test_a_section_that_says_neither_yes_nor_no_is_refused(section: Any) -> None:
    with pytest.raises(ConfigError, match="stronghold"):
        configs.section_enabled({"stronghold": section})


@pytest.mark.parametrize("word", ["strongold", "Stronghold", "stronghold_"])
def test_a_misspelt_section_is_warned_of_once(word: str, caplog: pytest.LogCaptureFixture) -> None:
    source.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(3):
            assert not configs.section_enabled({word: {"enabled": True}, "optimizer": {}, 5: 6})
    assert [record.message for record in caplog.records] == [
        f'config key "{word}" is ignored. Did you mean "stronghold"?'
    ]


# -- our section ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (25769803776, 24 * 2**30),
        (24e9, 24 * 10**9),
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("512MiB", 2**29),
        ("800 MB", 800 * 10**6),
        ("1.5 gib", 3 * 2**29),
        ("0.1GB", 10**8),
        ("3kB", 3000),
        ("1TiB", 2**40),
        ("4096 B", 4096),
    ],
)
def test_sizes_are_bytes(text: Any, size: int) -> None:
    assert load(stronghold={"gpu_memory": text}).stronghold.gpu_memory == size


@pytest.mark.parametrize(
    "size", ["24G", "24", "GB", "-1GB", "24 GX", "", 0, -5, True, 1.5, [1], "1e9B", "nan GB", "0GB"]
)
def test_a_size_with_two_meanings_or_none_is_refused(size: Any) -> None:
    message = section_refusal(host_memory=size)
    assert message.startswith(f"stronghold.host_memory: got {size!r}, expected bytes")
    assert "24GiB" in message


@pytest.mark.parametrize("section", [{5: 1}, {"emulated": {None: 1}}])
def test_a_key_of_the_section_that_is_no_string_is_unknown(section: dict[Any, Any]) -> None:
    for read in (configs.load, configs.check_keys):
        with pytest.raises(ConfigError, match=r"^stronghold\.(5|emulated\.None): unknown key"):
            read({**BASE, "stronghold": section})


def test_a_key_of_deepspeeds_that_is_no_string_changes_nothing() -> None:
    assert load().precision == configs.load({**BASE, 5: 1, "aio": {5: 1}}).precision


@pytest.mark.parametrize("absent", [None, "auto"])
def test_null_and_auto_mean_that_the_key_is_absent(absent: Any) -> None:
    section: dict[str, Any] = dict.fromkeys(StrongholdConfig.model_fields, absent)
    assert load(stronghold=section).stronghold == StrongholdConfig()
    section["emulated"] = dict.fromkeys(EmulatedConfig.model_fields, absent)
    assert load(stronghold=section).stronghold.emulated == EmulatedConfig()
    assert load(stronghold=absent).stronghold == StrongholdConfig()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("enabled", ["yes", 1]),
        ("frozen", ["int4", "NF4", True, 4]),
        ("device", ["gpu", 0, "CUDA"]),
        ("window", [0, -1, 1.5, "2", True, [1]]),
        ("activations", ["Keep", True, "none"]),
        ("resident_layers", [-1, "some", 1.5, True]),
        ("resident_updates", ["cuda", True, 1]),
        ("cpu_threads", [0, "4", 2.0]),
        ("layers", [1, [], [1], {}]),
        ("trace", [True, "", 3]),
        ("emulated", [True, 3, "fast"]),
        ("nvme", [True, 3, "/mnt/nvme0"]),
    ],
)
def test_a_wrong_value_names_its_key_and_what_is_expected(key: str, values: list[Any]) -> None:
    for value in values:
        message = section_refusal(**{key: value})
        assert message.startswith(f"stronghold.{key}: got {value!r}, expected "), message
        assert message.count("\n") == 0


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("poison", ["yes", 1]),
        ("jitter_s", [-0.1, "1", float("inf")]),
        ("seed", [-1, 1.5]),
        ("link_gbps", [0, -1, float("nan"), "8"]),
    ],
)
def test_a_wrong_value_in_a_sub_section_has_its_dotted_name(key: str, values: list[Any]) -> None:
    for value in values:
        message = section_refusal(emulated={key: value})
        assert message.startswith(f"stronghold.emulated.{key}: got {value!r}, expected "), message


def test_every_wrong_key_is_in_one_error() -> None:
    message = section_refusal(windo=3, device="gpu", chunk=0, emulated={"jitter": 1}, zzz=1)
    lines = message.splitlines()
    assert 'stronghold.windo: unknown key. Did you mean "window"?' in lines
    assert 'stronghold.emulated.jitter: unknown key. Did you mean "jitter_s"?' in lines
    assert any(
        line.startswith("stronghold.zzz: unknown key. Known keys: enabled, ") for line in lines
    )
    assert len(lines) == 6
    assert lines[-1].startswith("See ")  # the page of unknown keys


def test_contradictory_keys_are_refused() -> None:
    assert "stronghold.emulated" in section_refusal(device="cuda", emulated={"seed": 1})
    assert "stronghold.streams: got 2" in section_refusal(streams=2)


def test_activations_are_one_level_or_numbers_of_blocks_in_order() -> None:
    levels = {"recompute": 20, "attention": 8, "keep": 4}
    assert load(stronghold={"activations": "attention"}).stronghold.activations == "attention"
    given = load(stronghold={"activations": levels}).stronghold.activations
    assert list(given.items()) == list(levels.items())
    for wrong in ("recomput", {"recomput": 3}, {"keep": 0}, {}):
        assert "stronghold.activations: got" in section_refusal(activations=wrong)


def test_numbers_of_blocks_become_a_level_for_each() -> None:
    layout = ModelLayout(layers=tuple(layer_of_sizes(k, 8) for k in range(3)))
    section = load(stronghold={"activations": {"offload": 2, "keep": 1}}).stronghold
    assert pinned_activations(section, layout) == ("offload", "offload", "keep")
