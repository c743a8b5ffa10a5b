#!/usr/bin/env python3
"""Runs tests of other projects against stronghold's engine.

    scripts/conformance.py {accelerate,deepspeed,peft,transformers} SOURCES [--only TEXT]
    scripts/conformance.py deepspeed SOURCES --reference

SOURCES is a checkout of the project, which is not changed. It prints how many tests pass, cannot
apply (each for a reason of the tables below) and fail unexplained, and exits with 1 if one does.
With --reference each test runs with DeepSpeed's own engine, too. No code of these projects is here.

This file is the program, and the pytest plugin in the processes of the tests. Tests of a GPU run on
the pretended one of tests/pretended, which needs torch's build for the CPU.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import inspect
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 3600.0  # of one file of tests
WIDTH = 50  # of a file's name in what is printed

# Variables of the processes of the tests.
SUITE = "STRONGHOLD_CONFORMANCE_SUITE"
REFERENCE = "STRONGHOLD_CONFORMANCE_REFERENCE"  # set: DeepSpeed's own engine runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Files of tests that run under pytest, one process for each file.

    rows       patterns of tests that cannot apply, each with its reason (`rows_of`)
    folder     of the sources: pytest runs there
    prefix     of the files in that folder
    gpu_files  files that run on the pretended GPU
    options    further options of pytest
    """

    files: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    prefix: str
    folder: str = "."
    gpu_files: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def rows_of(table: str) -> tuple[tuple[str, str], ...]:
    """The patterns of a table, each with its reason: a line with the reason stands above them.

    A pattern is a regular expression. It is found in the name of a test that does not pass, and in
    what pytest said of it: another failure of the same test is unexplained. A test whose name has a
    pattern after "not run: " is skipped.
    """
    rows = []
    reason = ""
    for line in table.strip().splitlines():
        if line.startswith(" "):
            rows.append((line.strip(), reason))
        else:
            reason = line
    return tuple(rows)


# --- which tests run, and why some cannot apply ---------------------------------------------------

# Of DeepSpeed's unit tests those that one rank without a GPU can run. Left out: ZeRO++, MiCS,
# pipelines, experts, tensor and sequence parallelism, inference, hybrid engine, compression,
# torch.compile, and operators that need a GPU.
DEEPSPEED_FILES = {  # by folder: what follows "test_"
    "runtime": "lr_schedulers ds_initialize ds_config_dict ds_config_model data multi_output_model "
    "multiple_models no_sync_ctxt runtime_utils precision_config_dynamic_scale "
    "precision_config_loss_scale",
    "runtime/half_precision": "dynamic_loss_scale fp16 zero_optim_overflow",
    "runtime/zero": "ignore_unused_parameters unwrap_model zero_grad_clip zero_context "
    "zero_context_ancestry zero_context_return zero_leaf_module zero_nesting_init "
    "zero_tensor_fragment",
    "ulysses_alst": "tiled_compute",
    "v1": "engine_log_level",
    "v1/half_precision": "bf16 gradient_clipping_default mixed_precision_dtype",
    "v1/zero": "offload_states zero_cpu_offload_grad_accum zero2_offload_multi_backward "
    "zero_user_backward",
    "checkpoint": "convert_checkpoint latest_checkpoint lr_scheduler other_optimizer "
    "reshape_checkpoint shared_weights tag_validation universal_checkpoint zero_optimizer",
    "launcher": "ds_arguments run user_args",
    "monitor": "monitor",
    "ops/adam": "adamw cpu_adam",
}
DEEPSPEED = Suite(
    files=tuple(
        f"{at}/test_{n}.py" for at, names in DEEPSPEED_FILES.items() for n in names.split()
    ),
    folder="tests",
    prefix="unit/",
    gpu_files=(  # they skip tests on a CPU
        "checkpoint/test_lr_scheduler.py",
        "checkpoint/test_zero_optimizer.py",
        "runtime/zero/test_zero_tensor_fragment.py",
    ),
    rows=rows_of(r"""
uses what is refused by name, with the way out
    safe_set_full_\* is not supported
    data_types\.buffer_dtype: got
    but the config asks for fp32
    cannot run on the CPU here
    argument 'fp32_optimizer_states'
    TestTiledFusedLogitsLoss.*a gradient of .* came while the model's forward runs
    not run: .*TestFP16OptimizerForMoE
    test_no_sync_ctxt.*'NoneType' object has no attribute 'norm'
    test_zero_optim_overflow.*^E +(Assertion|assert)
asserts another class of the error; ours is ConfigError, with the edit
    test_zero_user_backward.*loss\.backward\(\) of a loss that was not scaled, in fp16
    test_zero_user_backward.*(managed_gradient_accumulation is false|coalesce_grad_reduction is a)
    test_zero_user_backward.*(model: a PipelineModule|engine\.scale: expected a scalar loss)
    test_ds_config_dict.*TestNoModel.*model is missing
reads the class, the insides or the timers of DeepSpeed's engine and optimizer; ours are others
    not run: .*v1/zero/test_offload_states\.py
    'EngineOptimizer' object has no attribute|Optimizer should be ZeROOptimizer
    test_unwrap_model.*assert hooks_exist\(engine\)
    test_adamw.*object has no attribute 'optimizer'
    test_ds_initialize\.Test\w*Optimizer.*EngineOptimizer
    test_zero_grad_clip.*isinstance\(EngineOptimizer
    no attribute '(step|rollback)_subgroup'
    throughput.*tput_timer
reads what stage 3 has partitioned, or marked as a leaf; here nothing is
    has no attribute '(ds_persist|ds_status|ds_tensor)
    only defined for ZeRO-3 partitioned parameters
    ext_param_return.*hasattr\(.*'ds_status'\)
    enabled_via_config.*False = z3_leaf_module\(
reads files of DeepSpeed's own checkpoint layout; stronghold export writes them
    not run: .*checkpoint/test_universal_checkpoint\.py
    checkpoint.*is not a model state checkpoint
    test_zero_optimizer.*frozen_weights.*'NoneType' object has no attribute 'keys'
asserts a refusal of what DeepSpeed cannot do, or does not want; here it works
    test_no_sync_ctxt.*DID NOT RAISE.*AssertionError
    test_zero_user_backward.*overlap_comm.*DID NOT RAISE
    must_enable_bf16_states.*DID NOT RAISE
    no_grad_input_error.*Expected RuntimeError: inputs with requires_grad=False
    test_ignore_unused.*DID NOT RAISE.*AssertionError
compares with a reference that adds micro-batches up in bf16; here they are fp32 sums
    test_zero_user_backward.*accumulation.*Gradients differ for
reads raw parameters right after step; engine.synchronize() comes first
    test_zero2_offload_multi_backward.*differs by
needs several ranks, or a process of its own; the tests of a file share one rank
    batch sizes do not multiply out
    assumes a world size of 2|is not divisible by 2|num_stages \(2\)
    test_zero_context.*invalid root rank: 1
    unique_tag.*DID NOT RAISE.*AssertionError
    scattered_init_dist.*function is_initialized
the installed DeepSpeed has removed the feature and refuses it itself
    amp: got .* DeepSpeed removed Apex|skipped: .*Amp is not installed
    DeepSpeedConfigError: .*has been removed
    no attribute 'MiCS_Init'
DeepSpeed skips it here: its parameters, a GPU, an operator or a package is missing
    skipped: (Local APIs only|Nvme offload not supported) for zero stage
    skipped: TODO: Frozen weights not currently supported by BF16 Optimizer
    skipped: .*(has not been implemented on this system|is not compatible)
    DistributedDataParallel device_ids|Invalid device string: '0'
    skipped: .*(CPU [aA]ccelerator|NCCL|not supported|half precision inf/nan output)
    skipped: .*(skip for now|timesout|WIP|run manually)
    TestCPUAdamGPUError.*DID NOT RAISE
    No module named '(comet_ml|tensorboard|wandb)'
    not run: .*launcher/test_user_args\.py.*pdsh
"""),
)

ACCELERATE = Suite(
    prefix="tests/deepspeed/",
    files=(
        "test_deepspeed.py",
        "test_deepspeed_gradient_accumulation.py",
        "test_deepspeed_multiple_model.py",
    ),
    rows=rows_of(r"""
launches a script that trains BERT on a data set of the hub; Accelerate calls most of them slow
    not run: .*test_basic_run
    skipped: test (is slow|requires multiple hardware accelerators)
asserts that ZeRO 3 refuses the weights without a key of its own; here each rank has them
    test_save_checkpoints.*(DID NOT RAISE|not raised)
"""),
)

# Left out: classes that need several GPUs, and the models that train by example programs.
TRANSFORMERS = Suite(
    prefix="tests/trainer/distributed/",
    files=("test_trainer_distributed_deepspeed.py",),
    options=("-k", "TestTrainerIntegrationDeepSpeed or TestNonTrainerIntegrationDeepSpeed"),
    rows=rows_of(r"""
asserts that Transformers sees stage 3; Accelerate's copy of the config says stage 2 here
    test_deepspeed_plugin_from_config.*AssertionError: 2 != 3
    test_ds_config_object.*assertTrue\(is_deepspeed_zero3_enabled
reads the masters inside of a DeepSpeed optimizer; safe_get_full_fp32_param gives them here
    'EngineOptimizer' object has no attribute 'fp32_partitioned_groups_flat'
asserts the names of DeepSpeed's checkpoint files; the same test resumes from ours
    test_save_checkpoints_.*global_step5/\w+_states\.pt is not found
Transformers skips it, or its last line, because DeepSpeed does not pass it
    test_early_get_last_lr_.*skipped: .*the optimizer seems run oddly
    test_can_resume_training_normal_.*skipped: .*slowly diverges
"""),
)
PEFT = rows_of(r"""
LoRA on nn.MultiheadAttention makes the base's parameters anew in each forward: refused
    is another nn\.Parameter each time the model lists its parameters
""")

SUITES = {"accelerate": ACCELERATE, "deepspeed": DEEPSPEED, "transformers": TRANSFORMERS}
HUGGING_FACE = ("accelerate", "transformers")  # on the pretended GPU, with models of our own


# --- the program ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=sorted([*SUITES, "peft"]))
    parser.add_argument("sources", type=Path, help="a checkout, or an unpacked distribution")
    parser.add_argument("--only", default="", help="files (of PEFT: rows) whose name has this")
    parser.add_argument("--reference", action="store_true", help="DeepSpeed's engine beside ours")
    arguments = parser.parse_args()
    name, sources = arguments.suite, arguments.sources.resolve()
    if arguments.reference and name != "deepspeed":
        parser.error("--reference is for the suite deepspeed")
    print(f"{name} {metadata.version(name)}, tests of {sources}")
    print(f"{'':{WIDTH}} pass  cannot apply  fail", flush=True)
    if name == "peft":
        rows = peft_rows(sources, arguments.only)
        return summarise({row: judge(PEFT, row, text) for row, text in rows.items()}, set())
    suite = SUITES[name]
    verdicts: dict[str, tuple[str, str]] = {}
    theirs: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        if name in HUGGING_FACE:
            build_hub(Path(scratch) / "hub" / "hub")
        for file in (file for file in suite.files if arguments.only in file):
            tests = run_file(name, file, sources, scratch)
            judged = {test: judge(suite.rows, test, text) for test, text in tests.items()}
            show(file, judged.values())
            verdicts |= judged
            if arguments.reference:
                tests = run_file(name, file, sources, scratch, reference=True)
                theirs |= {test for test, text in tests.items() if not text}
    return summarise(verdicts, theirs)


def judge(rows: tuple[tuple[str, str], ...], test: str, text: str) -> tuple[str, str]:
    """("pass", ""), ("cannot apply", its reason) or ("fail", the line that says most).

    text  what was said of a test that did not pass, or nothing
    """
    if not text:
        return "pass", ""
    for pattern, reason in rows:
        if re.search(pattern, f"{test}\n{text}", re.MULTILINE | re.DOTALL) or reason in text:
            return "cannot apply", reason
    lines = text.splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return "fail", (errors or lines)[0][:160]


def show(name: str, verdicts: Iterable[tuple[str, str]]) -> None:
    counts = Counter(verdict for verdict, _ in verdicts)
    passed, cannot_apply, failed = (counts[k] for k in ("pass", "cannot apply", "fail"))
    print(f"{name:{WIDTH}} {passed:4} {cannot_apply:13} {failed:5}", flush=True)


def summarise(verdicts: dict[str, tuple[str, str]], theirs: set[str]) -> int:
    """Print the sums and the reasons. Returns the exit code: 1 if a test is unexplained.

    theirs  tests that pass with DeepSpeed's own engine, if it ran
    """
    show("in all", verdicts.values())
    reasons = Counter(text for verdict, text in verdicts.values() if verdict == "cannot apply")
    lines = [f"{count:5}  {reason}" for reason, count in reasons.most_common()]
    print("\nCannot apply:", *lines, sep="\n")
    if theirs:
        passed_there = theirs & verdicts.keys()
        show(
            "of those that pass with DeepSpeed's engine", (verdicts[test] for test in passed_there)
        )
    failed = [f"{test}: {text}" for test, (verdict, text) in verdicts.items() if verdict == "fail"]
    print("\nUnexplained:" if failed else "", *failed, sep="\n")
    return 1 if failed or not verdicts else 0


def run_file(
    name: str, file: str, sources: Path, scratch: str, *, reference: bool = False
) -> dict[str, str]:
    """Run one file of tests. `reference`: with DeepSpeed's own engine, on the CPU.

    Returns what pytest said of each test that did not pass, and "" for each that did. A process
    without an end, or that breaks, counts as one test.
    """
    suite, report = SUITES[name], Path(scratch) / "report.xml"
    report.unlink(missing_ok=True)
    path = [ROOT / "scripts", ROOT]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
        "HF_HOME": f"{scratch}/hub",
        "HF_HUB_OFFLINE": "1",
        SUITE: name,
    }
    if reference:
        environment[REFERENCE] = "1"
    elif name in HUGGING_FACE or file in suite.gpu_files:
        environment |= {"STRONGHOLD_PRETENDED": "1", "DS_ACCELERATOR": "cuda"}
        path.append(ROOT / "tests" / "pretended" / "site")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conformance", "-p", "no:cacheprovider"]
    command += ["--basetemp", f"{scratch}/tmp", f"--junitxml={report}", *suite.options]
    try:
        done = subprocess.run(
            [*command, f"{suite.prefix}{file}"],
            cwd=sources / suite.folder,
            env=environment,
            timeout=LIMIT_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {file: f"no end within {LIMIT_S:.0f} s"}
    texts: dict[str, str] = {}
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        said = [f"{part.tag}: {part.get('message')}\n{part.text}" for part in case]
        test = f"{case.get('classname')}::{case.get('name')}"
        texts[test] = texts.get(test, "") + "\n".join(said)
    return texts or {file: f"no tests: {' '.join((done.stdout + done.stderr).split())[-140:]}"}


# --- the process of the tests ---------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before a conftest of DeepSpeed's lets its checkout be imported
def pytest_load_initial_conftests() -> None:
    """What is different in the process of the tests."""
    # The pretended GPU is of a package of ours: the foreign project has one of this name, too.
    sys.modules.pop("tests", None)
    if os.environ[SUITE] == "deepspeed":
        adapt_deepspeed()
    else:
        adapt_accelerate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    checkout = str(Path.cwd().parent)  # a spawned process must not find DeepSpeed there
    sys.path[:] = [path for path in sys.path if path != checkout]
    if REFERENCE in os.environ:
        return
    for item in items:
        for pattern, reason in SUITES[os.environ[SUITE]].rows:
            if re.match(pattern, f"not run: {item.nodeid}"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if os.environ[SUITE] == "deepspeed":
        adapt_test_modules({item.module for item in items})


def replace(owner: Any, name: str, call: Any) -> None:
    """Let `call` stand for a function, which it gets as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)  # the engine reads the signature of a schedule
    def replacement(*given: Any, **named: Any) -> Any:
        return call(original, *given, **named)

    setattr(owner, name, replacement)


# --- DeepSpeed's tests, on one rank ---------------------------------------------------------------


def adapt_deepspeed() -> None:
    """What is different in the process of DeepSpeed's tests, besides the section in each config.

    Distributed tests run in this process. The CPU accelerator computes in half precision, since the
    emulated device does. torch's DistributedDataParallel, the reference of many tests, runs on the
    CPU. An all-gather takes tensors without dimensions, as NCCL's does.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    def without_device_ids(init: Any, wrapper: Any, *given: Any, **named: Any) -> None:
        init(wrapper, *given, **{**named, "device_ids": None, "output_device": None})

    def gather_scalars(gather: Any, output_tensor: Any, input_tensor: Any, **named: Any) -> Any:
        return gather(output_tensor.view(-1), input_tensor.reshape(-1), **named)

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    torch.set_num_threads(1)
    if REFERENCE not in os.environ:
        importlib.import_module("stronghold.plugin")  # it replaces names that the tests import
        replace(deepspeed, "initialize", with_section)
        deepspeed.ops.__compatible_ops__["async_io"] = True  # this engine has its own
    replace(torch.nn.parallel.DistributedDataParallel, "__init__", without_device_ids)
    replace(torch.distributed, "all_gather_into_tensor", gather_scalars)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # compiles nothing
    accelerator = type(get_accelerator())
    accelerator.current_device = accelerator.current_device_name  # "cpu", not "0"
    accelerator.is_fp16_supported = lambda self: True
    importlib.import_module("unit.util").bf16_required_version_check = lambda *_, **__: True
    importlib.import_module("unit.common").DistributedExec._launch_with_file_store = on_one_rank


def with_section(initialize: Any, *given: Any, **named: Any) -> Any:
    """`stronghold.initialize` of the same config with our section in it."""
    import stronghold
    from stronghold.config import read_config

    call = inspect.signature(initialize).bind(*given, **named).arguments
    args, older = call.get("args"), call.pop("config_params", None)
    settings = read_config(call.pop("config", older), args)
    settings.setdefault("stronghold", {"device": "emulated", **blocks_of(call.get("model"))})
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(args, name, None) is not None:
            setattr(args, name, None)
    return stronghold.initialize(**call, config=settings)


def blocks_of(model: Any) -> dict[str, Any]:
    """The names of the parts of a toy without repeated blocks: else nothing of it is streamed."""
    import torch

    from stronghold.errors import ConfigError
    from stronghold.model.partition import partition

    if not isinstance(model, torch.nn.Module):
        return {}
    with contextlib.suppress(ConfigError):
        if partition(model).streamed:
            return {}
    parts = [name for name, part in model.named_children() if list(part.parameters())]
    return {"layers": parts} if parts else {}


def on_one_rank(test: Any, request: Any, world_size: Any) -> None:
    """Run a distributed test or fixture here, instead of in `world_size` processes."""
    import deepspeed
    import torch

    test.world_size = 1
    if test.init_distributed and not deepspeed.comm.is_initialized():
        if not torch.distributed.is_initialized():
            store = f"file://{tempfile.mkstemp()[1]}"
            torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    test.run(**test._fixture_kwargs)


def adapt_test_modules(modules: set[Any]) -> None:
    """Tests of DeepSpeed's CPU Adam get ours. Helpers that assert which parameters stage 3 has
    partitioned are left out, as none is: the tests that call them compare gradients, too."""
    import deepspeed

    import stronghold

    for module in modules:
        for name in ("assert_all_partitioned", "assert_persistent_resident"):
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: None)
        if module.__name__.endswith("test_cpu_adam"):
            deepspeed.ops.adam.DeepSpeedCPUAdam = stronghold.CPUAdam


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """DeepSpeed marks a class as a fixture for a pytest older than 8.4: a newer one gets a
    function for each such class."""
    if os.environ[SUITE] == "deepspeed" and isinstance(collector, pytest.Module):
        base = importlib.import_module("unit.common").DistributedFixture
        with contextlib.suppress(Exception):  # the file cannot be imported: pytest says so next
            for name, value in dict(vars(collector.obj)).items():
                if inspect.isclass(value) and issubclass(value, base) and value.world_size:

                    def run(request: Any, fixture: Any = value) -> None:
                        fixture()(request)

                    setattr(collector.obj, f"fixture_{name}", pytest.fixture(run, name=name))


# --- Hugging Face's tests, on the pretended GPU ---------------------------------------------------


def adapt_accelerate() -> None:
    """What is different where Accelerate reads the config.

    Every config gets our section, with a window of one layer, so layers move. Not those of tests
    that read a config and make no engine: there Accelerate would read stage 2 instead of 3. And
    not those of models without a Trainer, which the plugin must leave alone.
    """
    import deepspeed.ops.adam
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime import engine, lr_schedules
    from transformers.integrations import HfDeepSpeedConfig as ConfigOfModels

    import stronghold.plugin

    config_tests = re.compile(
        r"test_deepspeed\.py::.*::test_(deepspeed_plugin|ds_config_zero|init_zero3)"
    )

    def with_section(read: Any, config: Any) -> None:
        reads_alone = config_tests.search(os.environ.get("PYTEST_CURRENT_TEST", ""))
        if type(config) is not ConfigOfModels and not reads_alone:
            config.config.setdefault("stronghold", {"window": 1})
        read(config)

    def warm_up(init: Any, schedule: Any, *given: Any, **named: Any) -> None:
        # as DeepSpeed did when these tests were written; now it refuses 0
        if named.get("warmup_num_steps") == 0:
            named["warmup_num_steps"] = 1
        init(schedule, *given, **named)

    replace(HfDeepSpeedConfig, "set_stage_and_offload", with_section)
    replace(lr_schedules.WarmupLR, "__init__", warm_up)
    # Tests compare the engine's class with this name.
    engine.DeepSpeedEngine = stronghold.StrongholdEngine
    # Accelerate makes one of a torch.optim.AdamW. DeepSpeed would compile its own for minutes.
    deepspeed.ops.adam.DeepSpeedCPUAdam = stronghold.CPUAdam
    # This engine reads and writes files by itself, without DeepSpeed's operator.
    deepspeed.ops.__compatible_ops__["async_io"] = True


def build_hub(hub: Path) -> None:
    """Write tiny models of random weights into a cache of the hub, under the names of the tests."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    texts = ["question: In what country is it?  context: a region of many words and numbers"]
    tokenizer = hf.T5Tokenizer().train_new_from_iterator(texts, vocab_size=200)
    t5 = {"vocab_size": len(tokenizer) + 8, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    t5_config = hf.T5Config(**t5, num_layers=3, decoder_start_token_id=0)
    small = {"vocab_size": 1024, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(**small))
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    mixture = hf.Qwen2MoeConfig(**sizes, **heads, **experts, shared_expert_intermediate_size=16)
    models = {
        "patrickvonplaten/t5-tiny-random": [hf.T5ForConditionalGeneration(t5_config), tokenizer],
        "sshleifer/tiny-gpt2": [gpt2],
        "hf-internal-testing/tiny-random-gpt2": [gpt2],
        "gpt2": [gpt2],
        "hf-internal-testing/tiny-random-gptj": [
            hf.GPTJModel(hf.GPTJConfig(**small, rotary_dim=4))
        ],
        "peft-internal-testing/tiny-random-qwen-1.5-MoE": [hf.Qwen2MoeForCausalLM(mixture)],
        "apple/mobilevit-xx-small": [hf.MobileViTConfig()],
    }
    for repository, parts in models.items():
        folder = hub / f"models--{repository.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0")
        for part in parts:
            part.save_pretrained(folder / "snapshots" / "0")


# --- PEFT's table of adapters ---------------------------------------------------------------------

BASE = "model.base_model.model"  # of a row's model: what was adapted


def peft_rows(sources: Path, only: str) -> dict[str, str]:
    """Train each row of PEFT's table with the engine, and compare with a plain loop.

    In fp32, on one thread, with the native kernel of AdamW on both sides. Each part of the model is
    a layer of its own that streams through a window of one slot. A row passes if every loss, norm,
    weight and moment has the bits of the plain loop. If a refusal names `resident_layers` as the
    way out, the row is tried that way. A row whose second run in backward is refused passes if its
    blocks are kept.
    """
    import torch

    sys.path.insert(0, str(ROOT))  # the plain loop is the one of our tests
    torch.set_num_threads(1)
    logging.getLogger("stronghold").setLevel(logging.ERROR)
    table = read_table(sources / "tests" / "test_custom_models.py")
    texts = {}
    for number, (title, *row) in enumerate(table.TEST_CASES):
        if only not in title:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                compare(functools.partial(make_adapted, table, *row))
            texts[f"{number} {title}"] = ""
        except Exception as error:  # whatever a row does, the next one runs
            texts[f"{number} {title}"] = f"{type(error).__name__}: {error}"
    return texts


def read_table(file: Path) -> ModuleType:
    """Run PEFT's file of tests as far as its table TEST_CASES and its models.

    Classes of tests and helpers are left out: they need further packages, and the table does not.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    tree.body = [
        statement
        for statement in tree.body
        if not (isinstance(statement, ast.ImportFrom) and statement.level > 0)
        and not (isinstance(statement, ast.ClassDef) and statement.name.startswith("Test"))
    ]
    module = sys.modules["peft_table"] = ModuleType("peft_table")  # classes look up their module
    exec(compile(tree, str(file), "exec"), vars(module))
    return module


def make_adapted(table: ModuleType, name: str, config_class: Any, options: Any) -> tuple[Any, Any]:
    """The model of a row with its adapters, and its batches.

    Its loss is the mean squared distance of the output from fixed numbers. A scale is trained, too:
    the loss has a gradient even if a dropout leaves out all adapters.
    """
    import peft
    import torch

    class Scored(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, X: torch.Tensor) -> torch.Tensor:
            output = self.model(X=X) * self.scale
            target = torch.linspace(-1.0, 1.0, output.numel()).view_as(output)
            return (output - target).square().mean()

    base = table.MockTransformerWrapper.from_pretrained(name)
    settings = config_class(**copy.deepcopy(options))
    torch.manual_seed(0)
    model = Scored(peft.get_peft_model(base, settings)).train()
    # whole numbers below 100, the vocabulary of the embeddings
    return model, lambda seed: {"X": torch.arange(90).view(9, 10) + seed}


def compare(make: Any) -> None:
    """Raises AssertionError unless the engine's runs have all bits of the plain loop's, and that
    one has trained an adapter."""
    import torch
    from torch.utils.checkpoint import CheckpointError

    from stronghold.errors import ConfigError
    from tests.support.training import assert_identical, config, train_plain, train_windowed

    expected = train_plain(make, steps=3, clipping=0.5)
    model = make()[0]
    weights = {name: value for name, value in model.named_parameters() if name != "scale"}
    if all(torch.equal(value, expected.weights[name]) for name, value in weights.items()):
        raise AssertionError("the plain loop has trained no adapter")
    parts = model.get_submodule(BASE).named_children()
    layers = [f"{BASE}.{name}" for name, part in parts if list(part.parameters())]

    def check(**section: Any) -> None:
        settings = config(clipping=0.5, section={**section, "layers": layers})
        found = train_windowed(make, steps=3, settings=settings)
        assert_identical(found, expected)
        if found.norms != expected.norms:
            raise AssertionError(f"norms {found.norms} differ from {expected.norms}")

    try:
        check(window=1, activations="keep")
        check(window=1, activations="recompute")
    except CheckpointError as error:  # of the second run alone: blocks that are kept have passed
        if '"keep"' not in str(error):
            raise
        print(f"passes with activations kept: {str(error)[:80]}", flush=True)
    except ConfigError as error:
        if "resident_layers" not in str(error):
            raise
        check(resident_layers="all", resident_updates="gpu")
        print(f"passes with resident_layers: {str(error)[:80]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
