"""Text as bytes: where the quickstart's comes from, and how it is cut into batches."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

CHUNK_BYTES = 1 << 16
HELD_OUT = 20  # one chunk of this many is held out
NUM_HELD_OUT_BATCHES = 8
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def read_text(path: str | None) -> bytes:
    """The file, or the sources of Python's standard library, which every machine has."""
    if path is not None:
        return Path(path).read_bytes()
    folder = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(folder) for file in folder.rglob("*.py"))
    return b"".join(
        (folder / file).read_bytes() for file in sorted(files) if not LEFT_OUT & set(file.parts)
    )


class Corpus:
    """Random windows of `context` bytes, as batches on `device`, the CPU at first.

    Raises ValueError when the text is too short to be cut into training and held-out text.
    """

    def __init__(self, text: bytes, *, batch_size: int, context: int) -> None:
        chunk = min(CHUNK_BYTES, max(1, len(text) // HELD_OUT))
        chunks = [text[begin : begin + chunk] for begin in range(0, len(text), chunk)]
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for k, piece in enumerate(chunks):
            parts[k % HELD_OUT == HELD_OUT - 1].append(piece)
        self._training, self._held_out = (_tensor(b"".join(pieces)) for pieces in parts)
        if min(len(self._training), len(self._held_out)) <= context:
            least = HELD_OUT * (context + 1)
            raise ValueError(f"the text has {len(text)} bytes, at least {least} are needed")
        self.device = torch.device("cpu")
        self._batch_size, self._context = batch_size, context
        self.restart()

    def restart(self, seed: int = 0) -> None:
        """Begin the sequence of batches again: it is the same every time."""
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def num_bytes(self) -> int:
        """Bytes of training text."""
        return len(self._training)

    def batch(self) -> dict[str, torch.Tensor]:
        """The next batch, as keyword arguments of a Hugging Face model."""
        return self._cut(self._training, self._generator)

    def held_out_batches(
        self, num_batches: int = NUM_HELD_OUT_BATCHES
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The first held-out batches, the same on every call."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(num_batches):
            yield self._cut(self._held_out, generator)

    def _cut(self, text: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
        starts = torch.randint(len(text) - self._context, (self._batch_size,), generator=generator)
        rows = torch.stack([text[start : start + self._context] for start in starts.tolist()])
        rows = rows.long().to(self.device)
        # The model shifts the labels itself.
        return {"input_ids": rows, "labels": rows}


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
