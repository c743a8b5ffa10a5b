"""Laws of scripts/finetune's data: which tokens are trained, and how examples share rows.

With a tokenizer whose tokens are bytes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.finetuning import TEMPLATE, byte_tokenizer, jsonl, tiny_llama

import finetune_data as data  # isort: skip

# As reasoning models' templates do: what an earlier turn thought is gone, the last turn's is there.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}[thought]{% endif %}{{ m.content }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# As others do: the prompt opens a thought that no turn in the data has.
ASKING = TEMPLATE.replace("<assistant>{% endif", "<assistant>[think]{% endif")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


# --- what is trained ------------------------------------------------------------------------------


def trained_text(tokenizer: Any, example: data.Example) -> str:
    """The trained tokens as text, with a | wherever some are left out between."""
    parts, before = [], True
    for label in example.labels.tolist():
        if label == data.IGNORED:
            parts += [] if before else ["|"]
            before = True
        else:
            parts.append(tokenizer.convert_ids_to_tokens(label))
            before = False
    text = "".join(parts).replace("Ġ", " ").replace("Ċ", "\n")
    return text.removesuffix("|")


def test_of_a_prompt_and_its_completion_the_completion_and_the_end_are_trained(
    tokenizer: Any, tmp_path: Path
) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cd"})
    (example,) = data.Encoder(tokenizer, 10).read(file).kept
    a, b, c, d, end = (tokenizer.convert_tokens_to_ids(token) for token in [*"abcd", "<eos>"])
    assert example.tokens.tolist() == [a, b, c, d, end]
    assert example.labels.tolist() == [-100, -100, c, d, end]


CONVERSATION = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (TEMPLATE, "one<eos>|two<eos>"),
        (FORGETFUL, "one<eos>|[thought]two<eos>"),
        (ASKING, "one<eos>|two<eos>"),
    ],
    ids=["stable", "forgetful", "asking"],
)
def test_of_a_conversation_what_the_assistant_says_is_trained(
    tokenizer: Any, tmp_path: Path, template: str, trained: str
) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"messages": CONVERSATION})
    speaking = byte_tokenizer()
    speaking.chat_template = template
    (example,) = data.Encoder(speaking, 90).read(file).kept
    assert trained_text(tokenizer, example) == trained
    asked = speaking.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False)
    assert example.tokens.tolist() == asked


def test_text_in_parts_is_trained_as_the_text(tokenizer: Any, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    examples = [
        data.Encoder(tokenizer, 64).read(
            jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "assistant", "content": content}]})
        )
        for content in ("hello", parts)
    ]
    (plain,), (joined,) = (found.kept for found in examples)
    assert plain.tokens.tolist() == joined.tokens.tolist()
    assert plain.labels.tolist() == joined.labels.tolist()


def test_a_text_is_trained_whole_in_pieces_of_a_row(tokenizer: Any, tmp_path: Path) -> None:
    text = "".join(chr(97 + k % 26) for k in range(24))
    expected = [(text + "<eos>")[1:10], text[11:20], text[21:] + "<eos>"]
    records = [jsonl(tmp_path / f"a.{suffix}", {"text": text}) for suffix in ("jsonl", "json")]
    for file in (*records, tmp_path / "a.txt"):
        if file.suffix == ".txt":
            file.write_text(text)
        found = data.Encoder(tokenizer, 10).read(file)
        assert [trained_text(tokenizer, example) for example in found.kept] == expected
        assert found.num_trained == 25 - 3  # of each piece the first is predicted from nothing


def test_long_answers_are_cut_and_examples_without_one_are_left_out(
    tokenizer: Any, tmp_path: Path
) -> None:
    file = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "ab", "completion": "0123456789"},
        {"prompt": "a prompt as long as a row", "completion": "never seen"},
    )
    found = data.Encoder(tokenizer, 8).read(file)
    assert [trained_text(tokenizer, example) for example in found.kept] == ["012345"]
    assert (found.num_cut, found.num_untrained) == (2, 1)


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [1, 7, 64])
def test_packing_puts_every_example_into_one_row_that_holds_it(sequence: int) -> None:
    drawn = random.Random(sequence)
    lengths = [drawn.randint(1, sequence) for _ in range(300)]
    rows = data.pack(lengths, sequence)
    assert sorted(k for row in rows for k in row) == list(range(len(lengths)))
    filled = [sum(lengths[k] for k in row) for row in rows]
    assert max(filled) <= sequence
    # Any two rows together overflow one: no row could have been saved by joining two.
    assert len(rows) == 1 or sum(sorted(filled)[:2]) > sequence


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_has_the_logits_of_each_example_alone(
    tokenizer: Any, tmp_path: Path, packed: bool
) -> None:
    drawn = random.Random(0)
    texts = ["".join(drawn.choices("abcdef", k=drawn.randint(1, 9))) for _ in range(7)]
    file = jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    examples = data.Encoder(tokenizer, 16).read(file).kept
    rows = data.Rows(examples, 16, packed=packed)
    assert (len(rows) < len(examples)) is packed
    batch = data.Collator(0)([rows[k] for k in range(len(rows))])
    model = tiny_llama(len(tokenizer)).eval()
    with torch.no_grad():
        logits = model(**{key: batch[key] for key in batch if key != "labels"}, use_cache=False)
        wanted = {
            tuple(example.tokens.tolist()): model(
                input_ids=torch.from_numpy(example.tokens)[None].long()
            ).logits[0]
            for example in examples
        }
    seen = []
    for row, members in enumerate(rows._rows):
        begin = 0
        for k in members:
            tokens = examples[k].tokens.tolist()
            end = begin + len(tokens)
            assert batch["input_ids"][row, begin:end].tolist() == tokens
            assert batch["labels"][row, begin:end].tolist() == examples[k].labels.tolist()
            got = logits.logits[row, begin:end]
            assert torch.allclose(got, wanted[tuple(tokens)], atol=1e-5)  # other sums, fp32
            seen.append(k)
            begin = end
        assert set(batch["labels"][row, begin:].tolist()) <= {data.IGNORED}
    assert sorted(seen) == list(range(len(examples)))


def test_held_out_examples_are_not_trained_on_and_are_the_same_every_time() -> None:
    examples = [
        data.Example(tokens=np.array([k, k]), labels=np.array([-100, k])) for k in range(50)
    ]
    kept, held_out = data.split(examples, 0.1, 256, seed=1)
    assert (len(kept), len(held_out)) == (45, 5)
    assert {id(e) for e in kept} | {id(e) for e in held_out} == {id(e) for e in examples}
    again = data.split(examples, 0.1, 256, seed=1)[1]
    assert [int(e.tokens[0]) for e in again] == [int(e.tokens[0]) for e in held_out]
    assert data.split(examples[:1], 0.1, 256, seed=1) == (examples[:1], [])
    assert data.split(examples, 0.0, 256, seed=1) == (examples, [])


# --- errors ---------------------------------------------------------------------------------------

BAD_LINES = {
    '{"text": "a"}\n{"text": \n': "line 2: is not JSON",
    '[{"text": "a"}\n]': "line 1: .*one object on each line",
    '{"prompt": "a"}\n': 'line 1: got prompt; expected {"text"}',
    "3\n": "line 1: got int",
    '\n{"text": 3}\n': "line 2: text: got int, expected a string",
    '{"messages": "hi"}\n': "line 1: messages: expected a list",
    '{"messages": [{"role": "user", "content": "a"}]}\n': 'no "role": "assistant"',
    '{"messages": [{"role": "assistant", "content": null}]}\n': r"\[0\]: content: got None",
    '{"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}\n': "parts than text",
    "": "is empty",
    "\n\n": "is empty",
    '{"prompt": "long enough for it", "completion": "a"}\n': "nothing is left to train on",
    '{"prompt": "a", "completion": ""}\n{"text": ""}': None,
}


@pytest.mark.parametrize(("text", "message"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_bad_data_is_refused_with_its_line(
    tokenizer: Any, tmp_path: Path, text: str, message: str | None
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    if message is None:  # an empty answer still has an end to be trained
        assert len(data.Encoder(tokenizer, 8).read(file).kept) == 1
        return
    with pytest.raises(data.DataError, match=message):
        data.Encoder(tokenizer, 8).read(file)


def test_text_that_is_not_utf8_is_refused_with_its_line(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(data.DataError, match=r"a\.txt, line 2: is not UTF-8"):
        data.Encoder(tokenizer, 8).read(tmp_path / "a.txt")
