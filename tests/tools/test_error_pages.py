"""Laws of the errors that a newcomer meets first: each ends in a link to its page, and the page
begins with its message.
"""

from __future__ import annotations

import logging
import pickle
import re
import urllib.parse
from collections.abc import Callable
from email.message import Message
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import stronghold
from stronghold.devices.host_memory import GpuPinning
from stronghold.errors import ConfigError, ErrorPage, RankError, page_link
from stronghold.model.partition import why_no_blocks
from stronghold.native import loader
from stronghold.train.files import Files
from tests.models import MODELS
from tests.support.documents import DOCS, fenced
from tests.support.training import config, initialized

PAGES = DOCS / "errors"


def model() -> nn.Module:
    return MODELS["gpt"]()[0]


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(stronghold.StrongholdError) as caught:
        call()
    return str(caught.value)


def refusal(**section: object) -> str:
    """The error of an engine with this section."""
    return message_of(lambda: initialized(model(), config(section=section)))


def refused_by_an_optimizer_that_has_taken_steps() -> str:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return message_of(
        lambda: stronghold.initialize(model=trained, optimizer=optimizer, config=config())
    )


def refused_by_a_checkpoint(folder: Path) -> str:
    engine = initialized(model(), config())
    engine.save_checkpoint(str(folder))
    engine.destroy()
    other = initialized(MODELS["llama"]()[0], config())
    try:
        return message_of(lambda: other.load_checkpoint(str(folder)))
    finally:
        other.destroy()


def warned_of_pinned_memory(caplog: pytest.LogCaptureFixture) -> str:
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    with (
        mock.patch.object(torch.cuda, "cudart", return_value=refusing),
        caplog.at_level(logging.WARNING, logger="stronghold"),
    ):
        GpuPinning(torch.device("cpu")).pin(torch.empty(1))
    return caplog.messages[-1]


def refused_without_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(stronghold, "__path__", [str(folder)])
    return message_of(loader.library.__wrapped__)


@pytest.fixture
def messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> dict[ErrorPage, str]:
    """Each page's error, as a program gets it."""
    return {
        ErrorPage.GPU_MEMORY: refusal(gpu_memory=100),
        ErrorPage.HOST_MEMORY: refusal(host_memory=10_000),
        ErrorPage.DISK: message_of(lambda: Files([tmp_path], 1 << 60)),
        ErrorPage.PINNED_MEMORY: warned_of_pinned_memory(caplog),
        ErrorPage.NO_BLOCKS: why_no_blocks(nn.Sequential(nn.Linear(2, 3), nn.ReLU())),
        ErrorPage.UNKNOWN_KEY: refusal(windw=2),
        ErrorPage.TWO_OPTIMIZERS: refused_by_an_optimizer_that_has_taken_steps(),
        ErrorPage.OTHER_MODEL: refused_by_a_checkpoint(tmp_path),
        ErrorPage.RANK_LOST: str(RankError("clip barrier: rank 1 has ended (closed by peer)")),
        ErrorPage.KERNELS: refused_without_kernels(tmp_path, monkeypatch),
    }


def pattern_of(sample: str) -> str:
    """A sample of a message as a regular expression: other numbers and paths may stand there."""
    escaped = re.escape(" ".join(sample.split()))
    escaped = re.sub(r"CHECKPOINTS\S*|MyModel|/mnt/nvme", r"\\S+", escaped)
    return re.sub(r"\d+(\\\.\d+)?\\ (GiB|MiB|bytes)", r"[\\d.]+ (GiB|MiB|KiB|bytes)", escaped)


def test_an_error_ends_in_the_link_to_a_page_that_begins_with_it(
    messages: dict[ErrorPage, str],
) -> None:
    assert set(messages) == set(ErrorPage)
    for page, message in messages.items():
        *_, last = message.splitlines()
        assert last.startswith("See file:///"), message
        path = Path(urllib.parse.unquote(last.removeprefix("See file://")))
        assert path == PAGES / f"{page.value}.md"
        sample = fenced(path.read_text(encoding="utf-8"), "text")[0]
        assert re.match(pattern_of(sample), " ".join(message.split())), (sample, message)


def test_a_published_site_is_linked_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    published = Message()
    published["Project-URL"] = "Documentation, https://docs.example.org/stable/"
    monkeypatch.setattr(metadata, "metadata", lambda name: published)
    link = page_link.__wrapped__(ErrorPage.DISK)  # not the one that is kept
    assert link == "https://docs.example.org/stable/errors/disk.html"


def test_a_message_has_one_link_from_another_process_too() -> None:
    error = pickle.loads(pickle.dumps(RankError("clip barrier: rank 1 has ended")))
    again = RankError(f"rank 0: {error}")
    assert str(again).count("See ") == 1


def test_an_error_without_a_page_is_as_it_was() -> None:
    assert str(ConfigError("a key")) == "a key"
