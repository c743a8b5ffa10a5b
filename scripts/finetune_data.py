"""Text and conversations as rows of tokens: read, masked, packed.

A row holds one example or several. Labels are the tokens that are trained, -100 elsewhere: never
the first of an example, which nothing before it predicts. Packed rows number the positions of each
example from 0, by which transformers keeps attention within it; padding is one more example, that
has no labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

IGNORED = -100  # transformers' label for what is not trained
# suffixes of files with an object on each line
RECORDS = (".jsonl", ".ndjson", ".json")
FORMS = '{"text"}, {"prompt", "completion"} or {"messages"}'
TEXT_PIECE_CHARACTERS = 1 << 16  # a text file is tokenized in pieces of whole lines

Progress = Callable[[int], object]  # takes bytes that were read since the last call


class DataError(ValueError):
    """The data cannot be trained on; the message says where and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Tokens and labels of the same length, int32."""

    tokens: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORED))


@dataclass(slots=True, kw_only=True)
class Examples:
    """What was read from a file: examples with something to train on, and what became of others."""

    kept: list[Example] = field(default_factory=list)
    num_cut: int = 0  # longer than a sequence, and cut there
    num_untrained: int = 0  # left out: nothing to train on within a sequence

    @property
    def num_trained(self) -> int:
        """Tokens that are trained."""
        return sum(example.num_trained for example in self.kept)


class Encoder:
    """Records to examples of at most `sequence` tokens. `tokenizer`: a fast one of transformers."""

    def __init__(self, tokenizer: Any, sequence: int) -> None:
        self._tokenizer = tokenizer
        self._sequence = sequence
        self._end = tokenizer.eos_token_id

    def read(self, path: Path, progress: Progress = lambda num_bytes: None) -> Examples:
        """All examples of a file of `RECORDS`, or of any other as plain text. DataError names the
        line."""
        found = Examples()
        lines = _lines(path, progress)
        if path.suffix.lower() in RECORDS:
            for number, line in lines:
                if line.strip():
                    self._add_record(found, _record(path, number, line), f"{path}, line {number}")
        else:
            self._add_text(found, (line for _, line in lines))
        if not found.kept and not found.num_untrained:
            raise DataError(f"{path}: is empty")
        if not found.kept:
            raise DataError(
                f"{path}: nothing is left to train on: in all {found.num_untrained} examples the "
                f"answer is empty or begins after {self._sequence} tokens; raise --sequence"
            )
        return found

    def _add_record(self, found: Examples, record: dict[str, Any], where: str) -> None:
        if "messages" in record:
            tokens, trained = self._conversation(record["messages"], where)
        elif "prompt" in record and "completion" in record:
            prompt = self._starting(_string(record, "prompt", where))
            completion = self._ended(self._ids(_string(record, "completion", where)))
            tokens = prompt + completion
            trained = [False] * len(prompt) + [True] * len(completion)
        elif "text" in record:
            self._add_pieces(found, self._ended(self._starting(_string(record, "text", where))))
            return
        else:
            keys = ", ".join(sorted(record)) or "no key"
            raise DataError(f"{where}: got {keys}; expected {FORMS}")
        found.num_cut += len(tokens) > self._sequence
        self._add(found, tokens[: self._sequence], trained[: self._sequence])

    def _add_text(self, found: Examples, lines: Iterable[str]) -> None:
        tokens: list[int] = []
        for piece in _joined(lines):
            tokens += self._ids(piece) if tokens else self._starting(piece)
        if tokens:
            self._add_pieces(found, self._ended(tokens))

    def _add_pieces(self, found: Examples, tokens: list[int]) -> None:
        for begin in range(0, len(tokens), self._sequence):
            piece = tokens[begin : begin + self._sequence]
            self._add(found, piece, [True] * len(piece))

    def _add(self, found: Examples, tokens: list[int], trained: list[bool]) -> None:
        ids = np.asarray(tokens, dtype=np.int32)
        labels = np.where(np.asarray(trained, dtype=bool), ids, IGNORED).astype(np.int32)
        labels[:1] = IGNORED  # in a packed row the token before it is another example's
        example = Example(tokens=ids, labels=labels)
        if example.num_trained:
            found.kept.append(example)
        else:
            found.num_untrained += 1

    # -- tokens -----------------------------------------------------------------------------------
    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _starting(self, text: str) -> list[int]:
        """With what the tokenizer puts in front of a text, and without an end."""
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        return ids[:-1] if ids and ids[-1] == self._end else ids

    def _ended(self, tokens: list[int]) -> list[int]:
        if self._end is None or (tokens and tokens[-1] == self._end):
            return tokens
        return [*tokens, self._end]

    # -- conversations ----------------------------------------------------------------------------
    def _conversation(self, messages: Any, where: str) -> tuple[list[int], list[bool]]:
        """The rendered conversation; what the assistant says is trained."""
        messages = _checked_messages(messages, where)
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{where}: has messages, but the model's tokenizer has no chat template; use "
                '{"prompt", "completion"}, or add chat_template.jinja to the model directory'
            )
        text = self._render(messages, where)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        trained = [False] * len(encoded["input_ids"])
        for begin, end in self._spans(messages, text, where):
            for k, (first, last) in enumerate(encoded["offset_mapping"]):
                trained[k] = trained[k] or (begin <= first < end and first < last)
        return encoded["input_ids"], trained

    def _render(self, messages: list[Any], where: str, *, ask: bool = False) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=ask
            )
        except Exception as error:  # a template raises what it likes
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
        return rendered

    def _spans(self, messages: list[Any], text: str, where: str) -> Iterator[tuple[int, int]]:
        """Where each of the assistant's turns is in `text`: what the model has to write after the
        prompt, its end mark included."""
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            begin, asked = self._begin_of_turn(messages[:k], text, where)
            upto = self._render(messages[: k + 1], where)
            end = len(upto)
            if not (asked and text.startswith(upto)):
                # Templates of reasoning models render a turn differently when it is the last, or
                # ask for more than the turn then has: its text must be found, and its end mark
                # follows.
                begin, end = _found(str(message.get("content") or ""), begin, upto, text, where)
            yield begin, begin + len(text[begin:end].rstrip())

    def _begin_of_turn(self, before: list[Any], text: str, where: str) -> tuple[int, bool]:
        """Where the turn after `before` begins in `text`, and whether its header is behind that."""
        if not before:
            return 0, False
        for ask in (True, False):
            prompt = self._render(before, where, ask=ask)
            if text.startswith(prompt):
                return len(prompt), ask
        raise DataError(
            f"{where}: the chat template renders the turns before an answer in another way once it "
            "is there, so that the answer cannot be told apart; give prompt and completion instead"
        )


def _found(content: str, begin: int, upto: str, text: str, where: str) -> tuple[int, int]:
    """Begin and end of the turn that says `content`; `upto` renders it as the last turn."""
    content = content.strip()
    start, start_last = text.find(content, begin), upto.rfind(content)
    if not content or start < 0 or start_last < 0:
        raise DataError(
            f"{where}: the chat template rewrites what the assistant says, so that it cannot be "
            "told apart; give prompt and completion instead"
        )
    end, mark = start + len(content), upto[start_last + len(content) :]
    common = 0
    while common < len(mark) and text[end + common : end + common + 1] == mark[common]:
        common += 1
    return start, end + common


def _checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """The messages, with the content of each a string, or null beside tool calls."""
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not good or not messages:
        raise DataError(f'{where}: messages: expected a list of {{"role": ..., "content": ...}}')
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f'{where}: messages: no "role": "assistant", so nothing is trained')
    return [_with_text(message, f"{where}: messages[{k}]") for k, message in enumerate(messages)]


def _with_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Templates write what is not a string as Python does, or leave it out, and say nothing."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if isinstance(content, list) and content and all(map(_is_text, content)):
        return {**message, "content": "".join(part["text"] for part in content)}
    got = "a list of other parts than text" if isinstance(content, list) else repr(content)
    raise DataError(f"{where}: content: got {got}, expected a string")


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _string(record: dict[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key}: got {type(value).__name__}, expected a string")
    return value


def _lines(path: Path, progress: Progress) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                progress(len(line))
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: is not UTF-8 ({error.reason})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        hint = " (a JSON array? write one object on each line)" if number == 1 else ""
        raise DataError(f"{path}, line {number}: is not JSON: {error}{hint}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {number}: got {type(record).__name__}, expected {FORMS}")
    return record


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Pieces of whole lines, large enough for the tokenizer to be fast."""
    piece: list[str] = []
    length = 0
    for line in lines:
        piece.append(line)
        length += len(line)
        if length >= TEXT_PIECE_CHARACTERS:
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)


def split(
    examples: list[Example], fraction: float, most: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """Training and validation examples, drawn at random; one of each at least where there are two
    and `fraction` is not 0."""
    number = min(most, max(1, round(fraction * len(examples))), len(examples) - 1)
    if fraction <= 0 or number < 1:
        return examples, []
    drawn = np.random.default_rng(seed).permutation(len(examples))[:number]
    held_out = set(drawn.tolist())
    return (
        [example for k, example in enumerate(examples) if k not in held_out],
        [examples[k] for k in sorted(held_out)],
    )


def pack(lengths: list[int], sequence: int) -> list[list[int]]:
    """Which examples share a row of at most `sequence` tokens: best fit, the longest first."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by the tokens that still fit
    rooms = 0  # bit r is set while some row has room for exactly r
    for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        fitting = rooms >> lengths[k]
        if fitting:
            room = lengths[k] + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
            rows[row].append(k)
        else:
            room, row = sequence, len(rows)
            rows.append([k])
        left = room - lengths[k]
        with_room.setdefault(left, []).append(row)
        rooms |= 1 << left
    return rows


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of examples, packed or one by one, as dicts of int64 tensors."""

    def __init__(self, examples: list[Example], sequence: int, *, packed: bool) -> None:
        self._examples = examples
        lengths = [len(example) for example in examples]
        self._rows = pack(lengths, sequence) if packed else [[k] for k in range(len(examples))]
        self._packed = packed
        self.num_tokens = sum(lengths)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        members = [self._examples[k] for k in self._rows[index]]
        row = {
            "input_ids": _joined_tensor([member.tokens for member in members]),
            "labels": _joined_tensor([member.labels for member in members]),
        }
        if self._packed:
            row["position_ids"] = _joined_tensor([np.arange(len(member)) for member in members])
        return row


def _joined_tensor(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Collator:
    """Rows to a batch, padded on the right to the longest. There is no attention mask: what is to
    the right of a token is never seen, and padding has no labels."""

    pad_id: int

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        filler = {"input_ids": self.pad_id, "labels": IGNORED}
        batch = {}
        for name in rows[0]:
            padded = []
            for row in rows:
                missing = longest - len(row[name])
                rest = (
                    torch.arange(missing)
                    if name == "position_ids"
                    else torch.full((missing,), filler[name])
                )
                padded.append(torch.cat([row[name], rest]))
            batch[name] = torch.stack(padded)
        return batch
