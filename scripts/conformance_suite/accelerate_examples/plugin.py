"""A pytest plugin under which Accelerate's tests of its examples train with this engine.

Owns what is different in the process of the tests: the config that `accelerate launch` gets asks
for DeepSpeed, as `accelerate config` writes it. Examples that these tests leave out are added to
them: those for language models, the one that reads DeepSpeed's JSON with each template of
Accelerate, and `accelerate test`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate.utils
import pytest
from accelerate.test_utils.testing import run_command

from conformance_suite.accelerate import models, process

EXAMPLES = Path("examples")
TEMPLATES = EXAMPLES / "deepspeed_config_templates"
CLASS = "FeatureExamplesTests"
CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_processes": 1,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,  # a free one
    "deepspeed_config": {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
}
# Example, its arguments, and the file or folder that it leaves in OUT.
SCRIPTS = {
    "nlp_example": ("nlp_example.py", "", ""),
    "complete_nlp_example": (
        "complete_nlp_example.py",
        "--checkpointing_steps epoch --output_dir OUT",
        "epoch_2",
    ),
    "memory": ("by_feature/memory.py", "", ""),
    "automatic_gradient_accumulation": ("by_feature/automatic_gradient_accumulation.py", "", ""),
}
LANGUAGE_MODEL = (
    "by_feature/deepspeed_with_config_support.py --model_name_or_path HuggingFaceTB/SmolLM-360M "
    "--train_file OUT/train.txt --validation_file OUT/train.txt --block_size 32 "
    "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --num_train_epochs 1 "
    "--max_train_steps 6 --num_warmup_steps 2 --output_dir OUT/model"
)


def write_deepspeed_config(mixed_precision: str = "no", save_location: Any = None) -> Any:
    """Replace `write_basic_config`: the same file, for DeepSpeed."""
    # YAML reads JSON
    Path(save_location).write_text(json.dumps(CONFIG), encoding="utf-8")
    return save_location


def of_script(path: str, arguments: str, result: str) -> Callable[[Any], None]:
    """A test that launches one example."""

    def test(self: Any) -> None:
        words = arguments.replace("OUT", str(self.tmpdir)).split()
        run_command([*self.launch_args, str(EXAMPLES / path), *words])
        assert not result or (self.tmpdir / result).exists()

    return test


def of_template(template: Path) -> Callable[[Any], None]:
    """A test that trains a language model with one DeepSpeed JSON of Accelerate's templates."""

    def test(self: Any) -> None:
        rows = (row["sentence1"] for row in models.sentence_pairs(200, 0))
        (self.tmpdir / "train.txt").write_text("\n".join(rows), encoding="utf-8")
        config = {
            **CONFIG,
            "deepspeed_config": {
                "deepspeed_config_file": str(template.resolve()),
                "zero3_init_flag": True,
            },
        }
        del config["mixed_precision"]  # the template has it
        path = self.tmpdir / "template.yml"
        path.write_text(json.dumps(config), encoding="utf-8")
        words = LANGUAGE_MODEL.replace("OUT", str(self.tmpdir)).split()
        words[0] = str(EXAMPLES / words[0])
        run_command(["accelerate", "launch", f"--config_file={path}", *words])
        assert (self.tmpdir / "model" / "all_results.json").exists()

    return test


def check_machine(self: Any) -> None:
    """Run `accelerate test`."""
    command = ["accelerate", "test", "--config_file", str(self.config_file)]
    assert "Test is a success" in run_command(command, return_stdout=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Iterator[None]:
    """Add tests to the class of the examples' tests."""
    outcome: Any = yield
    module = outcome.get_result()
    if module_path.name != "test_examples.py":
        return
    owner = getattr(module.obj, CLASS)
    for name, script in SCRIPTS.items():
        setattr(owner, f"test_added_{name}", of_script(*script))
    for template in sorted(TEMPLATES.glob("*.json")):
        setattr(owner, f"test_added_template_{template.stem}", of_template(template))
    owner.test_added_accelerate_test = check_machine


def pytest_configure(config: pytest.Config) -> None:
    process.build_hub()
    accelerate.utils.write_basic_config = write_deepspeed_config
