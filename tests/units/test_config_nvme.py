"""What the config says about NVMe: our section, DeepSpeed's offload and aio keys, and both."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from stronghold.config import NvmeConfig, source
from tests.support.settings import BASE, load, refusal

ZERO = "zero_optimization"
AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}


def nvme(**config: Any) -> NvmeConfig | None:
    """The effective settings of a config."""
    return load(**config).stronghold.nvme


def refused(**config: Any) -> str:
    return refusal({**BASE, **config})


def offload(optimizer: Any = None, param: Any = None) -> dict[str, Any]:
    """A zero_optimization section in which state goes to these nvme_paths."""
    section: dict[str, Any] = {"stage": 2}
    for key, path in (("offload_optimizer", optimizer), ("offload_param", param)):
        if path is not None:
            section[key] = {"device": "nvme", "nvme_path": path}
    return section


def test_without_a_word_about_it_there_is_no_nvme() -> None:
    assert nvme() is None
    assert nvme(stronghold={"nvme": None}) is None
    assert nvme(stronghold={"nvme": "auto"}, aio=AIO) is None
    for device in ("cpu", "none"):
        zero = {"offload_optimizer": {"device": device}, "offload_param": {"device": device}}
        assert nvme(zero_optimization=zero) is None


def test_the_section_is_read() -> None:
    section = {"path": ["/a", "/b"], "capacity": "10GB", "spill": "masters"}
    settings = nvme(stronghold={"nvme": section})
    assert settings.model_dump() == {**section, "capacity": 10**10}
    assert settings.paths == ("/a", "/b")
    one = nvme(stronghold={"nvme": {"path": "/a"}})
    assert one.paths == ("/a",)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("path", ["", [], 3, [""], ["/a", 3]]),
        ("capacity", [0, "3G", True]),
        ("spill", ["gradients", 1]),
    ],
)
def test_a_wrong_value_has_its_dotted_name(key: str, values: list[Any]) -> None:
    for value in values:
        message = refused(stronghold={"nvme": {"path": "/a", key: value}})
        assert message.startswith(f"stronghold.nvme.{key}: got {value!r}, expected "), message
        assert message.count("\n") == 0


def test_a_misspelt_key_is_named() -> None:
    message, _ = refused(stronghold={"nvme": {"path": "/a", "spil": 3}}).splitlines()
    assert message == 'stronghold.nvme.spil: unknown key. Did you mean "spill"?'


@pytest.mark.parametrize(
    ("optimizer", "param", "paths", "spill"),
    [
        ("/a", None, ("/a",), "masters"),
        (None, "/a", ("/a",), "weights"),
        ("/a", "/a", ("/a",), "weights"),
        ("/a", "/b", ("/a", "/b"), "weights"),
    ],
)
def test_deepspeeds_keys_mean_the_same(
    optimizer: str | None, param: str | None, paths: tuple[str, ...], spill: str
) -> None:
    settings = nvme(zero_optimization=offload(optimizer, param), aio=AIO)
    assert settings.paths == paths
    assert settings.spill == spill
    section = {"path": list(paths), "spill": spill}
    assert nvme(stronghold={"nvme": section}) == settings
    both = nvme(stronghold={"nvme": section}, zero_optimization=offload(optimizer, param), aio=AIO)
    assert both == settings


def test_each_side_fills_what_the_other_leaves_out() -> None:
    settings = nvme(stronghold={"nvme": {"capacity": 4096}}, zero_optimization=offload("/a"))
    assert settings == NvmeConfig(path=["/a"], capacity=4096, spill="masters")


def test_the_sections_keys_come_first() -> None:
    section = {"nvme": {"path": "/b", "spill": "moments"}}
    settings = nvme(stronghold=section, zero_optimization=offload("/a", "/c"))
    assert (settings.paths, settings.spill) == (("/b",), "moments")


def test_a_path_must_come_from_somewhere() -> None:
    message = refused(stronghold={"nvme": {}})
    assert message.startswith("stronghold.nvme.path: missing")
    message = refused(zero_optimization={"offload_param": {"device": "nvme"}})
    assert message.startswith(f"{ZERO}.offload_param.nvme_path: missing")


def test_an_unknown_device_is_refused() -> None:
    message = refused(zero_optimization={"offload_optimizer": {"device": "disk"}})
    assert message.startswith(f"{ZERO}.offload_optimizer.device: got 'disk'.")


def test_keys_without_meaning_here_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    source.warn_once.cache_clear()
    zero = offload("/a")
    zero["offload_optimizer"]["buffer_count"] = 4
    del zero["stage"]
    with caplog.at_level(logging.WARNING, "stronghold"):
        for _ in range(2):
            load(zero_optimization=zero, aio=AIO).warn_of_ignored()
    assert [record.message for record in caplog.records] == [
        "config keys without effect under stronghold: aio.block_size, "
        "aio.intra_op_parallelism, aio.overlap_events, aio.queue_depth, aio.single_submit, "
        "aio.use_gds, "
        "zero_optimization.offload_optimizer.buffer_count"
    ]
