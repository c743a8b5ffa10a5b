"""Laws of the quickstart's text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("corpus", SCRIPTS / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_restart_gives_the_same_batches_and_held_out_text_is_always_the_same(
    corpus: ModuleType,
) -> None:
    data = corpus.Corpus(bytes(range(256)) * 100, batch_size=3, context=16)
    first = [data.batch()["input_ids"] for _ in range(4)]
    held_out = [batch["input_ids"] for batch in data.held_out_batches()]
    data.restart()
    again = [data.batch()["input_ids"] for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    for a, b in zip(held_out, data.held_out_batches(), strict=True):
        assert torch.equal(a, b["input_ids"])
    assert first[0].shape == (3, 16)
    assert first[0].dtype == torch.long


def test_held_out_text_is_never_trained_on(corpus: ModuleType) -> None:
    # Every 20th chunk of this text has a byte of its own.
    chunk = 100
    text = b"".join((b"v" if k % 20 == 19 else b"t") * chunk for k in range(20))
    data = corpus.Corpus(text, batch_size=4, context=32)
    assert set(torch.cat([data.batch()["labels"] for _ in range(50)]).unique().tolist()) == {
        ord("t")
    }
    held_out = torch.cat([batch["labels"] for batch in data.held_out_batches()])
    assert held_out.unique().tolist() == [ord("v")]
    assert data.num_bytes == 19 * chunk


@pytest.mark.parametrize("size", [0, 1, 15, 20 * 32])
def test_a_text_that_is_too_short_is_refused_with_the_least_size(
    corpus: ModuleType, size: int
) -> None:
    with pytest.raises(ValueError, match=f"has {size} bytes, at least 660"):
        corpus.Corpus(b"x" * size, batch_size=1, context=32)
    corpus.Corpus(b"x" * 660, batch_size=1, context=32).batch()


def test_the_default_text_is_python_and_a_file_is_taken_as_it_is(
    corpus: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "text").write_bytes(b"\x00\xffabc")
    assert corpus.read_text(str(tmp_path / "text")) == b"\x00\xffabc"
    text = corpus.read_text(None)
    assert len(text) > 5_000_000
    assert b"\nclass " in text
