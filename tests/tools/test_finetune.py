"""Laws of scripts/finetune: what does not go together is refused with one line; a run learns,
stops, goes on and leaves a model that opens; which tokens are trained, and how examples share rows.

On the emulated device, with a tiny Llama and a tokenizer whose tokens are bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.conftest import free_port
from tests.support import children
from tests.support.finetuning import SCRIPTS, TEMPLATE, byte_tokenizer, jsonl, tiny_llama
from tests.support.frameworks import RANK, fresh_accelerate, plugin, reset_accelerate

import finetune as program  # isort: skip
import finetune_data as data  # isort: skip
import finetune_training as training  # isort: skip

__all__ = ["fresh_accelerate", "plugin"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_llama(len(tokenizer)).save_pretrained(folder)
    return folder


def config_file(folder: Path, **changed: Any) -> Path:
    """A config as one in configs/, and a learning rate at which a tiny model learns."""
    settings = json.loads((SCRIPTS.parent / "configs" / "8b_24gb_ram.json").read_text())
    settings["optimizer"]["params"]["lr"] = 1e-2
    settings["stronghold"] = {"device": "emulated", "window": 1}
    file = folder / "config.json"
    file.write_text(json.dumps({**settings, **changed}))
    return file


def arguments(model: Path, file: Path, folder: Path, *more: str, **changed: Any) -> Any:
    config = config_file(folder, **changed)
    given = ["--model", model, "--data", file, "--config", config, "--output", folder / "out"]
    return program.parse_arguments([*map(str, given), *more])


def refused(args: argparse.Namespace, message: str) -> None:
    with pytest.raises(training.UserError, match=message):
        training.finetune(args)
    assert not args.output.exists()


@pytest.mark.usefixtures("fresh_accelerate", "plugin")
def test_files_that_do_not_go_together_are_refused_before_anything_is_built(
    model_dir: Path, tmp_path: Path
) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "abc"}, {"text": "abcdef"})
    refused(arguments(tmp_path / "no", file, tmp_path), "there is no directory")
    (tmp_path / "odd").mkdir()
    refused(arguments(tmp_path / "odd", file, tmp_path), "has no config.json")
    (tmp_path / "odd" / "config.json").write_text("{}")
    refused(arguments(tmp_path / "odd", file, tmp_path), "Unrecognized model")
    refused(arguments(model_dir, tmp_path / "no", tmp_path), "there is no such file")
    refused(arguments(model_dir, file, tmp_path, "--sequence", "97"), "the model has 96 positions")
    refused(arguments(model_dir, file, tmp_path, "--resume"), "there is no checkpoint")
    refused(arguments(model_dir, file, tmp_path, scheduler={"type": "WarmupLR"}), "--schedule")
    stage = {"stage": 4, "offload_param": {"device": "cpu"}}
    refused(arguments(model_dir, file, tmp_path, zero_optimization=stage), "stage: got 4")
    refused(arguments(model_dir, file, tmp_path, "--report", "nothing"), "--report: got nothing")
    args = arguments(model_dir, file, tmp_path)
    args.output = file / "out"
    refused(args, "--output: .*no files can be written there")
    bare = tmp_path / "bare"
    tiny_llama(259).save_pretrained(bare)
    refused(arguments(bare, file, tmp_path), "has no tokenizer")
    byte_tokenizer().save_pretrained(bare)
    tiny_llama(100).save_pretrained(bare)
    refused(arguments(bare, file, tmp_path), "do not belong together")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--config", "no_such"], "in configs/ are .*8b_24gb_ram"),
        (["--batch", "0"], "at least 1"),
        (["--batch", "many"], "got 'many', expected a whole number"),
        (["--validation", "1"], "a fraction"),
        (["--epochs", "2", "--max-steps", "3"], "not allowed with"),
    ],
)
def test_arguments_are_refused_at_once(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ["--model", "m", "--data", "d", "--output", "o", "--config", "8b_24gb_ram", *given]
    with pytest.raises(SystemExit, match="2"):
        program.parse_arguments(whole)
    assert re.search(message, capsys.readouterr().err)


def test_the_command_of_the_pages_is_complete() -> None:
    page = (SCRIPTS.parent / "docs" / "your_model.md").read_text()
    (line,) = re.findall(r"^scripts/finetune (.*)$", page, flags=re.MULTILINE)
    args = program.parse_arguments(line.split())
    assert args.config.samefile(SCRIPTS.parent / "configs" / "8b_24gb_ram.json")
    assert (args.epochs, args.max_steps, args.packing, args.resume) == (1.0, None, True, False)


# --- runs -----------------------------------------------------------------------------------------


def sums(path: Path) -> Path:
    drawn = random.Random(0)
    pairs = [(drawn.randrange(30), drawn.randrange(30)) for _ in range(200)]
    return jsonl(path, *({"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in pairs))


def losses(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


RUN = ["--sequence", "48", "--accumulation", "2", "--log-every", "1", "--eval-every", "10"]


@pytest.mark.usefixtures("fresh_accelerate", "plugin")
def test_a_run_learns_resumes_as_if_uninterrupted_and_leaves_a_model(
    model_dir: Path, tmp_path: Path
) -> None:
    file = sums(tmp_path / "a.jsonl")
    whole_run = [*RUN, "--max-steps", "24", "--save-every", "10"]
    args = arguments(model_dir, file, tmp_path, *whole_run)
    whole = training.finetune(args)
    held_out = losses(whole, "eval_loss")
    assert len(held_out) == 1 + 2 + 1  # before the first step, every ten, at the end
    assert held_out[-1] < held_out[0] - 1
    assert losses(whole)[-1] < losses(whole)[0] - 1
    assert len(losses(whole)) == 24

    opened = AutoModelForCausalLM.from_pretrained(args.output)
    untrained = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    trained = whole.model.state_dict()
    for name, weight in opened.state_dict().items():
        assert torch.equal(weight, trained[name]), name
        assert not torch.equal(weight, untrained[name]), name
    assert opened.config.use_cache
    assert AutoTokenizer.from_pretrained(args.output).chat_template == TEMPLATE
    kept = sorted(path.name for path in args.output.glob("checkpoint-*"))
    assert kept == ["checkpoint-20", "checkpoint-24"]
    assert not (args.output / "checkpoint-20" / "model.safetensors").exists()

    reset_accelerate()
    with pytest.raises(training.NotPossible, match="--resume goes on from it"):
        training.finetune(args)
    with pytest.raises(training.NotPossible, match="has taken 24 steps, of 24"):
        training.finetune(arguments(model_dir, file, tmp_path, *whole_run, "--resume"))
    # as a run leaves it that is
    shutil.rmtree(args.output / "checkpoint-24" / "global_step24")
    # killed while it saves
    (args.output / "checkpoint-24" / "trainer_state.json").unlink()
    with pytest.raises(training.NotPossible, match="seed was 0, is 1"):
        training.finetune(arguments(model_dir, file, tmp_path, *whole_run, "--resume", "--seed=1"))
    resumed = training.finetune(arguments(model_dir, file, tmp_path, *whole_run, "--resume"))
    assert losses(resumed) == losses(whole)
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, trained[name]), name


@pytest.mark.usefixtures("fresh_accelerate", "plugin")
def test_weights_are_saved_from_where_they_are(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second copy of the model would not fit the RAM that the first one fills."""
    saved: list[str] = []

    def save(
        model: torch.nn.Module,
        output_dir: str,
        *,
        state_dict: dict[str, torch.Tensor],
        **options: Any,
    ) -> None:
        for name, parameter in model.named_parameters():
            if ".layers." in name:
                assert state_dict[name].data_ptr() == parameter.data_ptr(), name
                saved.append(name)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)
    file = sums(tmp_path / "a.jsonl")
    training.finetune(arguments(model_dir, file, tmp_path, "--sequence=48", "--max-steps=1"))
    assert len(saved) == 3 * 9  # at the end alone, and not once more in the checkpoint


@pytest.mark.usefixtures("fresh_accelerate")
def test_an_error_is_one_line_and_the_first_line_comes_before_anything_is_read(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*RANK, "MASTER_PORT"):
        os.environ.pop(name, None)  # as without a launcher
    file = tmp_path / "bad.jsonl"
    file.write_text("{\n")
    given = ["--model", model_dir, "--data", file, "--config", config_file(tmp_path)]
    assert program.main([*map(str, given), "--output", str(tmp_path / "out")]) == 2
    written = capsys.readouterr()
    assert written.out.startswith("finetune: loading torch")
    assert written.err.startswith(f"finetune: {file}, line 1: is not JSON")
    assert written.err.count("\n") == 1
    assert {name: os.environ[name] for name in RANK} == RANK
    assert int(os.environ["MASTER_PORT"]) > 0


PROGRAM = """
import os, runpy, sys
folder, program = sys.argv[1:3]
os.chdir(folder)
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(program))
runpy.run_path(program, run_name="__main__")
"""


def test_the_program_trains_on_text_as_a_launcher_starts_it(
    model_dir: Path, tmp_path: Path
) -> None:
    """With DeepSpeed's own launcher: test_readme."""
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    given = ["--local_rank=0", "--model", model_dir, "--data", "a.txt"]
    given += ["--config", config_file(tmp_path), "--output", "out", "--max-steps", "2"]
    given += ["--no-packing", "--sequence", "32"]
    environment = {**os.environ, **RANK, "MASTER_PORT": str(free_port())}
    status, said = children.run(
        PROGRAM, tmp_path, SCRIPTS / "finetune.py", *given, folder=tmp_path, env=environment
    )
    assert status == 0, said
    assert "stronghold engine active" in said
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert len(json.loads((tmp_path / "out" / "log.json").read_text())) > 2


# -- data ------------------------------------------------------------------------------------------

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
        # of each piece the first is predicted from nothing
        assert found.num_trained == 25 - 3


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
    lengths = [len(example) for example in examples]
    members_of = data.pack(lengths, 16) if packed else [[k] for k in range(len(examples))]
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
    for row, members in enumerate(members_of):
        begin = 0
        for k in members:
            tokens = examples[k].tokens.tolist()
            end = begin + len(tokens)
            assert batch["input_ids"][row, begin:end].tolist() == tokens
            assert batch["labels"][row, begin:end].tolist() == examples[k].labels.tolist()
            got = logits.logits[row, begin:end]
            # other sums, fp32
            assert torch.allclose(got, wanted[tuple(tokens)], atol=1e-5)
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
