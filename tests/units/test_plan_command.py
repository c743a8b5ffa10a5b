"""Laws of `stronghold plan`: what it prints is what the planner and the estimate said, what it
writes runs, and it never promises more than the machine can do."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, HeliumConfig

import stronghold
from stronghold.config import load
from stronghold.errors import ConfigError
from stronghold.plan.machine import MachineProfile, machine_names
from stronghold.tools.estimate.estimate import estimate
from stronghold.tools.estimate.model import from_config, from_sizes
from stronghold.tools.estimate.question import question_from_options
from tests.support.children import FOREIGN
from tests.support.forecasts import PROGRESS, SIZES, asked, full_estimate, run
from tests.support.pairs import pairs
from tests.support.published import published
from tests.support.sizes import named_size


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    published("Llama-3.3-70B").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


# -- the page -------------------------------------------------------------------------------------


def test_the_page_says_what_fits_how_fast_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    status, page, _ = run(*SIZES, "--machine", "rtx4090", "--gpu", "1GiB", capsys=capsys)
    assert status == 0
    for expected in (
        "6 blocks",
        "batch 1 x 64 tokens = 64 tokens per step, clipped at 1",
        "RTX 4090",
        "\nFITS\n",
        "  gpu ",
        "of 1.00 GiB",
        "6 of 6 blocks stay on the gpu",
        "tokens/s",
        "of the step",
        "Physical limit",
        "the plan reaches",
        "twice the tokens: batch 2",
        '"stronghold": {',
    ):
        assert expected in page
    assert "1 GiB more" not in page  # a whole model gains nothing
    assert "lean" not in page  # the host holds the states
    assert max(map(len, page.split("Config")[0].splitlines())) <= 100


def test_an_unknown_optimizer_is_refused_with_those_that_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, errors = run(*SIZES, "--optimizer", "Lio", capsys=capsys)
    assert status != 0
    assert "AdamW, Lion, SGD" in errors
    assert 'Did you mean "lion"?' in errors


def test_json_has_the_figures_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    call = [*SIZES, "--machine", "a100-80gb"]
    _, page, _ = run(*call, capsys=capsys)
    status, text, _ = run(*call, "--json", capsys=capsys)
    figures = json.loads(text)
    assert status == 0
    assert figures["fits"] is True
    assert figures["tokens"] == 64
    timing = figures["timing"]
    assert timing["tokens_per_s"] * timing["step_s"] == pytest.approx(64)
    assert f"{timing['tokens_per_s']:,.0f} tokens/s" in page
    assert f"{timing['bound']}, {next(iter(timing['shares'].values())):.0%} of the step" in page
    assert list(timing["shares"].values()) == sorted(timing["shares"].values(), reverse=True)
    assert figures["limits"]["bound"] in page
    assert [tier["name"] for tier in figures["tiers"]] == ["gpu", "host"]


@pytest.mark.slow
def test_on_stdout_is_the_answer_alone() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "stronghold.tools.cli", "plan", *SIZES, "--machine", "rtx4090"]
    result = subprocess.run(
        [*command, "--json"],
        env=environment,  # without a GPU DeepSpeed, once imported, warns on stdout
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(result.stdout)["fits"] is True
    assert result.stderr.startswith(PROGRESS)
    assert not FOREIGN.search(result.stderr)


def test_more_memory_is_never_said_to_cost_anything(tmp_path: Path) -> None:
    """And it buys much where a slow link streams what the GPU could hold."""
    machine = MachineProfile.load("rtx4090")
    slow = dataclasses.replace(machine, fetch_gbps=1.0, offload_gbps=1.0, duplex_gbps=1.5)
    slow.save(tmp_path / "slow.json")
    found = full_estimate(
        asked(hidden=1024, heads=8, gpu="90MB", clipping=0.0, machine=str(tmp_path / "slow.json"))
    )
    assert found.fits
    gains = dict(found.gains)
    assert "1 GiB more of host memory" not in gains  # there is plenty
    assert found.bound.startswith("link")
    more = gains["1 GiB more on the gpu"]
    assert more.step_s < 0.95 * found.step_s
    *_, used = (sum(parts.values()) for _, parts in found.tiers.values())
    short = full_estimate(dataclasses.replace(found.question, host_bytes=used))
    assert dict(short.gains)["1 GiB more of host memory"].step_s <= short.step_s


def test_what_host_memory_cannot_hold_goes_to_nvme() -> None:
    """The page, the limit and the config all know of it; no step is faster than the disk."""
    words = {"layers": 12, "hidden": 768, "heads": 12, "host": "350MB", "gpu": "450MiB"}
    assert not estimate(asked(**words)).fits
    found = full_estimate(asked(**words, nvme="1TB"))
    assert found.fits
    budget, parts = found.tiers["nvme"]
    assert 0 < sum(parts.values()) <= budget == 10**12
    assert found.step_s >= found.limits.parts["nvme"] > 0.0
    settings = load(found.config)
    assert settings.stronghold.nvme.paths == ("/path/to/nvme",)
    assert "1 GiB more of nvme" not in dict(found.gains)
    short = full_estimate(dataclasses.replace(found.question, nvme_bytes=sum(parts.values())))
    assert "1 GiB more of nvme" in dict(short.gains)


def test_nvme_needs_a_measured_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = dataclasses.replace(
        MachineProfile.load("rtx4090"),
        nvme_read_gbps=None,
        nvme_write_gbps=None,
        nvme_mixed_gbps=None,
    )
    machine.save(tmp_path / "diskless.json")
    options = ["--machine", str(tmp_path / "diskless.json"), "--nvme", "1TB"]
    status, _, error = run(*SIZES, *options, capsys=capsys)
    assert status == 2
    assert "stronghold doctor --path" in error


# -- what does not fit ----------------------------------------------------------------------------


@pytest.mark.slow
def test_lean_states_are_named_where_host_memory_is_short_and_chosen_only_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = [*SIZES, "--machine", "rtx4090", "--gpu", "4MB"]
    numel = from_sizes(6, 128, 4, 500, 64).layout.num_parameters
    short = ["--host", f"{8 * numel}B"]
    status, page, _ = run(*call, *short, capsys=capsys)
    assert status == 1
    assert re.search(r"states: lean \(they round otherwise\) +fits: ", page)
    status, page, _ = run(*call, *short, "--states", "lean", capsys=capsys)
    assert status == 0
    assert "bf16 with lean states" in page
    assert '"states": "lean"' in page


def test_what_does_not_fit_is_said_with_the_change_that_makes_it_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = [*SIZES, "--machine", "rtx4090", "--gpu", "8MB"]
    status, page, _ = run(*call, "--host", "1MiB", capsys=capsys)
    assert status == 1
    assert "DOES NOT FIT" in page
    assert "Prediction" not in page
    assert "Physical limit" in page
    needed = named_size(page, r"at\s+least")
    status, page, _ = run(*call, "--host", f"{needed}B", capsys=capsys)
    assert status == 0
    assert "\nFITS\n" in page
    status, _, _ = run(*call, "--host", f"{int(needed * 0.99)}B", capsys=capsys)
    assert status == 1


def test_a_sequence_too_long_is_told_what_takes_the_memory_and_the_ways_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The call sets no window: the page names none."""
    sizes = ["--layers", "4", "--hidden", "4096", "--heads", "32", "--vocab", "50304"]
    call = [*sizes, "--machine", "rtx4090", "--gpu", "6GiB", "--batch", "2", "--seq", "32768"]
    status, page, _ = run(*call, capsys=capsys)
    assert status == 1
    said = " ".join(page.partition("Physical limit")[0].split())
    assert "got 6.00 GiB, but the smallest plan with 65,536 tokens in a micro-batch" in said
    assert named_size(said, "activations of one block") > 8 << 30
    assert "stronghold.window" not in said
    assert not re.search(r"\d{7}", said), "a size is not in GiB"
    for way in ("lower the micro-batch", "set stronghold.chunk to 1", "shorten the sequences"):
        assert way in said
    _, page, _ = run(*call[:-4], "--batch", "1", "--seq", "32768", capsys=capsys)
    assert "stronghold.chunk" not in page.partition("Physical limit")[0]


# -- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_config_loads_and_says_what_was_planned(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "configs" / "small.json"
    options = ["--batch", "2", "--accumulation", "3", "--clipping", "0.5", "--gpu", "200MB"]
    options += ["--chunk", "1"]
    status, page, _ = run(
        *SIZES,
        *options,
        *("--machine", "rtx3090", "--precision", precision, "--write", str(path)),
        capsys=capsys,
    )
    assert status == 0
    assert f"The config is in {path}" in page
    settings = load(path)
    assert settings.precision == precision
    assert settings.deepspeed.train_micro_batch_size_per_gpu == 2
    assert settings.gradient_accumulation_steps == 3
    assert settings.gradient_clipping == 0.5
    assert settings.stronghold.chunk == 1
    # activations need the rest
    assert 100_000_000 < settings.stronghold.gpu_memory < 200_000_000


@pytest.mark.parametrize("gpu", ["4MB", "6MB", "40MB"])
def test_the_config_runs_as_it_was_planned(gpu: str, tmp_path: Path) -> None:
    """On the emulated device: window, residents and bytes are those of the page."""
    config = GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=500, n_positions=64)
    config.save_pretrained(tmp_path)
    question = asked(
        model=tmp_path, layers=None, hidden=None, heads=None, vocab=None, gpu=gpu, host="100MB"
    )
    found = estimate(question)
    written = json.loads(json.dumps(found.config))
    written["stronghold"]["device"] = "emulated"
    engine, *_ = stronghold.initialize(
        model=AutoModelForCausalLM.from_config(config), config=written
    )
    try:
        ids = torch.zeros(1, 64, dtype=torch.long)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        report = engine.memory_report()
        (_, device), (_, host) = found.tiers["gpu"], found.tiers["host"]
        planned = sum(device.values()) - device["activations"]
        assert report.gpu_peak == report.gpu_planned == planned
        # Offloaded activations are pinned as they come: the emulated device's attention saves more.
        planned = sum(host.values()) - host["activations"]
        assert report.host_peak == report.host_planned == planned
        section = found.config["stronghold"]
        assert engine.plan.window == section.get("window", 0)
    finally:
        engine.destroy()


def test_a_config_that_cannot_be_written_is_a_mistake_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    status, _, error = run(
        *SIZES, "--machine", "rtx4090", "--write", str(tmp_path / "file" / "x.json"), capsys=capsys
    )
    assert status == 2
    assert "--write" in error
    assert error.count("\n") == 1


# -- the model ------------------------------------------------------------------------------------


def test_a_directory_and_its_config_file_are_the_same_model(llama: Path) -> None:
    by_directory, by_file = from_config(llama), from_config(llama / "config.json")
    assert by_directory.layout == by_file.layout
    assert by_directory.layout.num_parameters == 70_553_706_496
    assert by_directory.num_blocks == 80


@pytest.fixture(scope="module")
def without_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one block."""
    folder = tmp_path_factory.mktemp("helium")
    shape = HeliumConfig(
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        vocab_size=300,
        max_position_embeddings=32,
        architectures=["HeliumForCausalLM"],
    )
    shape.save_pretrained(folder)
    return folder


def test_a_model_without_blocks_stays_whole_and_the_page_says_so(
    without_blocks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["--model", str(without_blocks), "--machine", "rtx4090", "--batch", "2"]
    status, page, _ = run(*call, "--chunk", "1", "--gpu", "1GiB", capsys=capsys)
    assert status == 0
    page = " ".join(page.split())  # it wraps its lines
    assert "in 0 blocks" in page
    assert "has no repeated blocks: all of it stays on the gpu; --chunk has no effect" in page
    assert "resident layers are updated on the gpu" in page
    status, page, _ = run(*call, "--gpu", "100kB", capsys=capsys)
    assert status == 1
    assert "the model has no repeated blocks, so that all of it stays" in " ".join(page.split())


def test_a_sequence_beyond_the_models_positions_is_noted(tmp_path: Path) -> None:
    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=300, n_positions=32).save_pretrained(
        tmp_path
    )
    question = question_from_options(model=tmp_path, machine="h200")
    assert question.seq == 32
    assert full_estimate(question).notes == ()
    notes = full_estimate(dataclasses.replace(question, seq=33)).notes
    assert any("33" in note and "32 positions" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        pytest.param("[" * 100_000, "cannot be read as JSON", id="deep"),
        ("{}", "model_type: got None"),
        ('{"model_type": "lama"}', "model_type: got 'lama'"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "--model"),
    ],
)
def test_a_config_that_is_none_is_said(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_config(tmp_path)


def test_without_transformers_the_way_out_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        from_config(llama)


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "rtx4090"], "--layers, --hidden, --heads, --vocab: missing"),
        ([*SIZES[:4], "--machine", "rtx4090"], "--heads, --vocab: missing"),
        ([*SIZES, "--machine", "rtx4090", "--model", "."], "--model and --layers"),
        (["--model", "nowhere", "--machine", "rtx4090"], "neither a directory nor a file"),
        ([*SIZES, "--machine", "rtx4900"], 'Did you mean "rtx4090"'),
        ([*SIZES, "--machine", "rtx4090", "--gpu", "24G"], "--gpu 24G: expected bytes"),
        ([*SIZES, "--machine", "rtx4090", "--batch", "0"], "--batch: got 0"),
        ([*SIZES, "--machine", "rtx4090", "--layers", "0"], "--layers: got 0"),
        ([*SIZES, "--machine", "rtx4090", "--clipping", "-1"], "--clipping: got -1"),
        ([*SIZES, "--machine", "rtx4090", "--heads", "3"], "--heads: got 3"),
        ([*SIZES, "--machine", "rtx4090", "--gpus", "2", "--network", "9"], "with --nodes M"),
    ],
)
def test_a_mistake_is_one_line_with_the_options_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, page, error = run(*arguments, capsys=capsys)
    assert (status, page) == (2, "")
    assert message in error
    assert error.count("\n") == 1


def test_a_machine_that_was_not_measured_is_told_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("STRONGHOLD_PROFILE", raising=False)
    status, _, error = run(*SIZES, capsys=capsys)
    assert status == 2
    assert "stronghold doctor" in error
    assert "rtx4090" in error


def test_this_machines_profile_is_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRONGHOLD_PROFILE", "v100-32gb")
    status, page, _ = run(*SIZES, capsys=capsys)
    assert status == 0
    assert "on V100 32 GB" in page


def test_the_largest_micro_batch_fits_and_one_more_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = [*SIZES, "--machine", "rtx4090", "--gpu", "60MB", "--host", "100MB"]
    status, page, _ = run(*call, "--batch", "max", capsys=capsys)
    assert status == 0
    found = re.search(r"batch (\d+) x 64 tokens", page)
    largest = int(found[1])
    assert largest > 1
    assert run(*call, "--batch", str(largest), capsys=capsys)[0] == 0
    assert run(*call, "--batch", str(largest + 1), capsys=capsys)[0] == 1
    assert run(*call, "--batch", "0", capsys=capsys)[0] == 2


@pytest.mark.parametrize(("options", "planned"), [({}, 0), ({"clipping": 0.0}, None)])
def test_early_updates_are_planned_where_no_step_clips(
    options: dict[str, float], planned: int | None
) -> None:
    assert asked(**options).demand.early_layers == planned


# -- never faster than what is physically possible ------------------------------------------------
EARLY = {"clipping": 0.0}
ROUNDING = 1e-6
BATCHES: dict[str, tuple[int, int, dict[str, str]]] = {  # batch, accumulation, tiers
    "1": (1, 1, {}),
    "4-small-gpu": (4, 1, {"gpu": "10GB"}),
    "16": (16, 1, {}),
    "2x4": (2, 4, {}),
    "4-nvme": (4, 1, {"host": "8GB", "nvme": "200GB"}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("machine", "case", "updates"), pairs(machine_names(), BATCHES, {"gated": {}, "early": EARLY})
)
def test_no_plan_beats_the_physical_limit(
    machine: str, case: tuple[int, int, dict[str, str]], updates: dict[str, object]
) -> None:
    """Adam's host memory is the transfers' too, whichever of them was submitted first."""
    batch, accumulation, tiers = case
    if "nvme" in tiers and MachineProfile.load(machine).nvme_read_gbps is None:
        pytest.skip("the profile has no disk")
    question = question_from_options(
        layers=8,
        hidden=2048,
        heads=16,
        vocab=50304,
        seq=2048,
        machine=machine,
        batch=batch,
        accumulation=accumulation,
        **tiers,
        **updates,
    )
    found = estimate(question)
    assert found.fits
    assert found.step_s >= found.limits.seconds * (1.0 - ROUNDING)
    assert sum(found.shares.values()) <= 1.001
