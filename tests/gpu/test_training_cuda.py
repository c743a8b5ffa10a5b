"""The laws of training on a real GPU: the emulated tests' bodies with another device.

What a plain loop on the same GPU gives is the reference: the same kernels in the same order, so
that losses and weights must be equal to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import stronghold
from stronghold.devices import cuda
from stronghold.errors import ConfigError
from stronghold.optim.states import StateKind
from stronghold.train.demand import GPU_SHARE
from tests.laws import test_chunks as chunks
from tests.models import (
    HIDDEN,
    HUGGING_FACE,
    MODELS,
    PLAIN,
    Decoder,
    loss_of,
    token_batch,
    without_caches,
)
from tests.models.families import llama_of
from tests.models.families import odd_llama as llama
from tests.pretended.process_groups import COMMUNICATOR_BYTES
from tests.support.insides import offload_small
from tests.support.ranks import ROOT, run_ranks
from tests.support.sleeping import sleep_on_stream
from tests.support.training import (
    ADAM,
    DTYPES,
    KernelOptimizer,
    Run,
    assert_identical,
    config,
    dense_copies,
    flash_in_one_order,
    initialized,
    on,
    train_windowed,
)

pytestmark = pytest.mark.gpu

PRETENDED = "tests.pretended.install" in sys.modules
STEPS = 10
POLICIES = ["keep", "offload", "recompute"]
# All that is said stays said: what is left open is planned anew after the first steps, and a GPU's
# memory holds any model of these whole.
STREAMED: dict[str, Any] = {"window": 1, "resident_layers": 0}
WINDOWS = [STREAMED, {**STREAMED, "window": 2}, {"resident_layers": "all"}]


def train_plain_on_gpu(
    factory: Any, *, precision: str, clipping: float, accumulation: int, steps: int = STEPS
) -> Run:
    """Autograd on the GPU; gradients copied to the CPU, added in fp32, applied by the kernel."""
    torch.manual_seed(0)
    model, make_batch = factory()
    without_caches(model)
    dtype = DTYPES[precision]
    mirrors: dict[nn.Parameter, nn.Parameter] = {}
    model.cuda()
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
        if parameter.requires_grad:
            mirrors[parameter] = nn.Parameter(parameter.detach().cpu())
    kind: StateKind = "lean" if precision == "lean" else "exact"
    optimizer = KernelOptimizer(torch.optim.AdamW(list(mirrors.values()), **ADAM), kind)
    run = Run()
    sums: dict[nn.Parameter, torch.Tensor] = {}
    torch.manual_seed(1)
    for micro in range(steps * accumulation):
        loss = loss_of(model(**on(torch.device("cuda"), make_batch(micro))))
        (loss / accumulation if accumulation > 1 else loss).backward()
        run.losses.append(loss.detach().clone())
        for parameter, mirror in mirrors.items():
            if parameter.grad is not None:
                gradient = parameter.grad.cpu()
                if accumulation > 1:
                    gradient = gradient.float()
                sums[mirror] = sums[mirror] + gradient if mirror in sums else gradient
                parameter.grad = None
        if (micro + 1) % accumulation == 0:
            run.norms.append(optimizer.step(sums, clipping))
            sums.clear()
            for parameter, mirror in mirrors.items():
                parameter.data.copy_(mirror)
    run.weights = {name: x.cpu() for name, x in dense_copies(model.state_dict()).items()}
    return run


@functools.cache
def plain(name: str, precision: str, clipping: float, accumulation: int) -> Run:
    factory = llama if name == "odd llama" else MODELS[name]
    return train_plain_on_gpu(
        factory, precision=precision, clipping=clipping, accumulation=accumulation
    )


def check(name: str, section: dict[str, Any], **options: Any) -> None:
    factory = llama if name == "odd llama" else MODELS[name]
    settings = config(section={"device": "cuda", **section}, **options)
    run = train_windowed(factory, steps=STEPS, settings=settings)
    run.weights = {key: value.cpu() for key, value in run.weights.items()}
    assert_identical(run, plain(name, **{"precision": "fp32", "accumulation": 1, **options}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_window_and_policy_never_change_a_bit(
    accumulation: int, clipping: float, precision: str
) -> None:
    for window, policy in itertools.product(WINDOWS, POLICIES):
        section = {**window, "activations": policy}
        check(
            "odd llama", section, precision=precision, clipping=clipping, accumulation=accumulation
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*PLAIN, *HUGGING_FACE])
def test_any_model_trains_as_without_a_window(name: str, policy: str) -> None:
    check(name, {**STREAMED, "activations": policy}, clipping=0.5)


FUSED = [
    (SDPBackend.EFFICIENT_ATTENTION, "fp32"),
    (SDPBackend.FLASH_ATTENTION, "bf16"),
    (SDPBackend.CUDNN_ATTENTION, "bf16"),  # what torch chooses first on an H100
]


def check_fused_attention(kernel: SDPBackend, precision: str) -> None:
    """What the kernel gave is given again: beside tensors numbers, and tensors that are not there.
    Sequences are too short for it to add in another order."""
    options: dict[str, Any] = {"precision": precision, "clipping": 0.5, "accumulation": 1}
    with sdpa_kernel(kernel):
        expected = train_plain_on_gpu(MODELS["gpt"], **options)
        for policy in ("attention", "attention_offload"):
            section = {"device": "cuda", **STREAMED, "activations": policy}
            settings = config(section=section, **options)
            run = train_windowed(MODELS["gpt"], steps=STEPS, settings=settings)
            run.weights = {key: value.cpu() for key, value in run.weights.items()}
            assert_identical(run, expected)


@pytest.mark.parametrize(("kernel", "precision"), FUSED)
def test_what_fused_attention_gave_is_given_again(
    kernel: SDPBackend,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    offload_small(monkeypatch)
    check_fused_attention(kernel, precision)
    assert "computed again" not in caplog.text, "the engine has not seen the kernel"


class CalledFourTimes(nn.Module):
    """Two calls of a model that calls its blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MODELS["called_twice"]()[0]

    def forward(self, **batch: Any) -> torch.Tensor:
        halves = ({key: value[at::2] for key, value in batch.items()} for at in range(2))
        first, second = (loss_of(self.model(**half)) for half in halves)
        return first + 2.0 * second


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("calls", [2, 4])
def test_calls_of_one_backward_are_added_as_autograd_adds_them(
    calls: int, window: int, accumulation: int
) -> None:
    """Of every layer parts come, more than there are slots, and no sum begins before they are
    added in bf16, in their order."""

    def four_times() -> tuple[nn.Module, Any]:
        return CalledFourTimes(), MODELS["called_twice"]()[1]

    factory = chunks.called_twice if calls == 2 else four_times
    options: dict[str, Any] = {"precision": "bf16", "clipping": 0.5, "accumulation": accumulation}
    section = {"device": "cuda", **STREAMED, "window": window, "activations": "keep"}
    run = train_windowed(factory, steps=STEPS, settings=config(section=section, **options))
    assert_identical(run, train_plain_on_gpu(factory, **options))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "lean"])
def test_a_plan_of_its_own_never_changes_a_bit(precision: str) -> None:
    """Nothing is said: the plan is made, and made anew after the first steps. With lean states what
    stays on the GPU is updated on the host."""
    check("odd llama", {}, precision=precision, clipping=0.5)


def test_lean_states_on_the_gpu_are_refused() -> None:
    settings = config(
        precision="lean", section={"device": "cuda", "resident_updates": "gpu", **STREAMED}
    )
    with pytest.raises(ConfigError, match="lean states are updated on the host"):
        train_windowed(llama, steps=1, settings=settings)


class Late(torch.autograd.Function):
    """The identity; backward's stream may take its time before it goes on."""

    cycles = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sleep_on_stream(Late.cycles)
        return gradients[0].clone()


class TwoStreams(nn.Module):
    """A block that computes one half beside the other."""

    streams: ClassVar[list[torch.cuda.Stream]] = []  # the second one, of all blocks

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.streams:
            self.streams.append(torch.cuda.Stream())
        here, beside = torch.cuda.current_stream(), self.streams[0]
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            first = torch.tanh(self.first(x))
        x.record_stream(beside)
        first.record_stream(here)
        # Computed last, its gradients come first; their stream is the later one.
        second = Late.apply(self.second(x))
        here.wait_stream(beside)
        return x + first + torch.tanh(second)


CYCLES = 10_000_000  # milliseconds


@pytest.mark.parametrize("held_up", ["stream", "offload"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("section", [STREAMED, {**STREAMED, "resident_layers": 5}])
def test_blocks_may_compute_on_several_streams(
    section: dict[str, Any], clipping: float, held_up: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients leave when all streams have written theirs, and none of them writes into a slot
    that is still on its way out: one of the streams takes long here, or the way out."""
    submit = cuda.StreamLane.submit

    def late(lane: Any, operation: str, work: Any, *after: Any, **declared: Any) -> Any:
        def later() -> None:
            if lane.name == held_up:
                sleep_on_stream(CYCLES)
            work()

        return submit(lane, operation, later, *after, **declared)

    def factory() -> Any:
        return Decoder([TwoStreams() for _ in range(6)]), token_batch

    expected = train_plain_on_gpu(factory, precision="fp32", clipping=clipping, accumulation=1)
    monkeypatch.setattr(cuda.StreamLane, "submit", late)
    monkeypatch.setattr(Late, "cycles", CYCLES if held_up == "stream" else 0)
    settings = config(
        section={"device": "cuda", **section, "activations": "keep"}, clipping=clipping
    )
    run = train_windowed(factory, steps=STEPS, settings=settings)
    assert_identical(run, expected)


def test_a_step_of_residents_that_gates_nothing_waits_for_no_backward() -> None:
    returned_early: list[bool] = []

    def inspect(engine: Any) -> None:
        loss = loss_of(engine(**on(torch.device("cuda"), llama()[1](0))))
        begun = torch.cuda.Event()

        def late(gradient: torch.Tensor) -> None:
            sleep_on_stream(200 * CYCLES)
            begun.record()

        loss.register_hook(late)
        engine.backward(loss)
        engine.step()
        returned_early.append(not begun.query())
        norm = engine.get_global_grad_norm()
        assert norm == engine.optimizer.grad_norm == engine.get_global_grad_norm()
        assert norm > 0.0

    for clipping in (0.0, 0.5):
        # In bf16 the test's config checks for overflow if gradients are clipped. Then step waits.
        section = {"device": "cuda", "resident_layers": "all"}
        settings = config(section=section, clipping=clipping, precision="bf16")
        run = train_windowed(llama, steps=STEPS, settings=settings, inspect=inspect)
        expected = plain("odd llama", "bf16", clipping, 1)
        assert run.norms == expected.norms
    assert returned_early == [True, False]


def test_attention_at_real_lengths_adds_in_one_order() -> None:
    """What the other laws stand on: a backward of many rows, twice."""
    shape = (2, 8, 2048, 64)
    parts = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    found = []
    for _ in range(2):
        q, k, v = (part.clone().requires_grad_() for part in parts[:3])
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(parts[3])
        found.append((q.grad, k.grad, v.grad))
    assert all(map(torch.equal, *found))


class Size(NamedTuple):
    """Of a Llama with four blocks and a batch of one sequence; `pairs` are of keys and values."""

    hidden: int
    inner: int
    heads: int
    pairs: int
    vocabulary: int
    tokens: int


# The blocks of Llama 3.2 1B; smaller ones where the host computes.
SIZE = Size(64, 256, 4, 2, 61, 96) if PRETENDED else Size(2048, 8192, 32, 8, 8192, 2048)


def sized_llama(size: Size) -> Any:
    model = llama_of(size.hidden, size.inner, 4, size.heads, size.pairs, size.vocabulary)

    def make_batch(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, size.vocabulary, (1, size.tokens), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return model, make_batch


def test_real_shapes_have_the_plain_loops_bits() -> None:
    """Kernels are chosen by shapes, addresses and workspaces: views of slots get those that the
    plain loop's own tensors get."""
    options: dict[str, Any] = {"precision": "bf16", "clipping": 0.5, "accumulation": 1}
    factory = functools.partial(sized_llama, SIZE)
    with flash_in_one_order():
        expected = train_plain_on_gpu(factory, steps=3, **options)
        for policy in ("keep", "recompute"):
            section = {"device": "cuda", **STREAMED, "activations": policy}
            run = train_windowed(factory, steps=3, settings=config(section=section, **options))
            assert_identical(run, expected)
            assert run.norms == expected.norms


def test_capturing_a_cuda_graph_is_refused() -> None:
    def inspect(engine: Any) -> None:
        batch = on(torch.device("cuda"), llama()[1](0))
        with (
            pytest.raises(ConfigError, match="a CUDA graph is being captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            engine(**batch)

    settings = config(section={"device": "cuda", **STREAMED, "activations": "keep"})
    train_windowed(llama, steps=1, settings=settings, inspect=inspect)


TOKEN_OUT_OF_RANGE = """
import tests.conftest, stronghold, torch
from tests.models import MODELS, loss_of
from tests.support.training import config, on
model, make_batch = MODELS["gpt"]()
settings = config(section={"device": "cuda", "window": 1, "resident_layers": 0})
engine, *_ = stronghold.initialize(
    model=model, model_parameters=model.parameters(), config=settings
)
try:
    for step in range(4):
        batch = on(torch.device("cuda"), make_batch(step))
        if step == 2:
            batch = {name: value + 10**6 for name, value in batch.items()}
        engine.backward(loss_of(engine(**batch)))
        engine.step()
finally:
    engine.destroy()
"""


def test_a_kernel_that_fails_ends_the_program_by_its_error() -> None:
    """From then on every call of CUDA's fails, those that end the engine too."""
    pretended = {"STRONGHOLD_PRETENDED": "1", "PYTHONPATH": f"{ROOT}/tests/pretended/site:{ROOT}"}
    environment = {**os.environ, "DS_ACCELERATOR": "cuda", **(pretended if PRETENDED else {})}
    command = [sys.executable, "-c", TOKEN_OUT_OF_RANGE]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode != 0, ended.stderr
    first = re.search(r"^[\w.]*Error: .*", ended.stderr, re.MULTILINE)
    assert "CUDA error" in first[0], ended.stderr


def test_a_cap_on_the_process_is_what_it_can_reach() -> None:
    total = cuda.identity(0)[1]
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        assert cuda.reachable_bytes(0) <= total // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.alone  # other processes take memory of the device, and give it back
def test_what_torch_keeps_of_tensors_that_are_gone_is_free() -> None:
    torch.cuda.empty_cache()
    before = cuda.free_bytes(0)
    gone = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert cuda.free_bytes(0) <= before - (1 << 30)
    del gone
    assert cuda.free_bytes(0) == before > torch.cuda.mem_get_info()[0]
    torch.cuda.empty_cache()


def test_a_plan_is_made_from_what_is_free_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have taken memory since the engine was made, or given it back."""
    seen: list[int] = []
    taken = 1 << 28

    def inspect(engine: Any) -> None:
        free, total = torch.accelerator.get_memory_info()
        for left in (free, free - taken):
            monkeypatch.setattr(
                torch.accelerator, "get_memory_info", lambda index=None, left=left: (left, total)
            )
            found = engine.inspect().device.memory.free_bytes()
            seen.append(found)

    settings = config(section={"device": "cuda", **STREAMED})
    train_windowed(llama, steps=1, settings=settings, inspect=inspect)
    assert seen[1] == seen[0] - taken


@pytest.mark.usefixtures("warm_products")
@pytest.mark.parametrize(
    "place",
    [STREAMED, {"resident_layers": "all"}, {"resident_layers": "all", "resident_updates": "gpu"}],
)
def test_states_that_leave_the_gpu_leave_it_to_others(place: dict[str, Any]) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    there: list[int] = []

    def inspect(engine: Any) -> None:
        there.append(torch.cuda.memory_allocated() - before)
        engine.offload_states()
        there.append(torch.cuda.memory_allocated() - before)
        engine.reload_states()
        engine.backward(loss_of(engine(**on(torch.device("cuda"), llama()[1](0)))))
        engine.step()

    train_windowed(
        llama, steps=1, settings=config(section={"device": "cuda", **place}), inspect=inspect
    )
    assert there[1] < 4096 < there[0], "more than the loss and the norm of the last step"


@pytest.mark.usefixtures("warm_products")
@pytest.mark.parametrize("place", [STREAMED, {"resident_layers": "all", "resident_updates": "gpu"}])
def test_weights_that_stay_are_all_that_stays(place: dict[str, Any]) -> None:
    """Of masters, moments and gradients nothing is on the GPU, by torch's own count."""
    gc.collect()  # engines of other tests
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    there: list[int] = []

    def taken() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before

    def inspect(engine: Any) -> None:
        there.append(taken())
        engine.offload_states(include=["optim_states", "hp_params", "lp_grads"])
        there.append(taken())
        with torch.no_grad():
            engine(**on(torch.device("cuda"), llama()[1](0)))
        there.append(taken())
        now = engine.inspect()
        largest = max(layer.weight_bytes for layer in now.layout.layers if layer.streamed)
        layers = now.layout.layers
        staying = [layer.weight_bytes for layer in layers if layer.index in now.plan.resident]
        slots = now.plan.window * largest if len(staying) < len(layers) else 0
        there.append(slots + sum(staying))
        engine.reload_states()
        engine.backward(loss_of(engine(**on(torch.device("cuda"), llama()[1](0)))))
        engine.step()

    train_windowed(
        llama, steps=1, settings=config(section={"device": "cuda", **place}), inspect=inspect
    )
    everything, away, evaluated, weights = there
    assert weights <= away <= weights + 4096, "more than the loss and the norm of the last step"
    assert evaluated <= away + 4096
    assert away < everything


def test_weights_are_given_on_the_gpu_one_at_a_time() -> None:
    """`engine.named_weights(device="cuda")`: one tensor beside what the engine has."""
    model, make_batch = llama()
    engine = initialized(model, config(section={"device": "cuda", **STREAMED}))
    batch = on(torch.device("cuda"), make_batch(0))
    engine.backward(loss_of(engine(**batch)))
    engine.step()
    engine.synchronize()
    largest = max(p.nbytes for p in engine.module.parameters())
    expected = {name: value.cuda() for name, value in engine.module.state_dict().items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    names = []
    for name, tensor in engine.named_weights(device="cuda"):
        assert tensor.is_cuda
        assert torch.equal(tensor, expected[name]), name
        names.append(name)
        del tensor
    assert names == list(expected)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= largest + 8192
    engine.destroy()


def test_the_slots_are_all_that_the_engine_takes() -> None:
    """Peak bytes of slots equal the plan's; torch's allocator holds them and activations."""

    def inspect(engine: Any) -> None:
        report = engine.memory_report()
        assert report.gpu_peak == report.gpu_planned
        assert report.host_peak == report.host_planned
        assert torch.cuda.memory_allocated() >= report.gpu_planned

    section = {"device": "cuda", **STREAMED, "window": 2, "activations": "keep"}
    settings = config(section=section, precision="bf16")
    train_windowed(llama, steps=STEPS, settings=settings, inspect=inspect)


def test_slots_are_free_as_soon_as_the_engine_drops_them() -> None:
    """The plan's live as long as the engine does: no copy makes the allocator wait for its stream
    before it gives their memory to others."""
    torch.cuda.empty_cache()  # what other tests left
    held: list[int] = []

    def inspect(engine: Any) -> None:
        held.append(engine.memory_report().gpu_planned)

    settings = config(section={"device": "cuda", **STREAMED, "activations": "keep"})
    train_windowed(llama, steps=2, settings=settings, inspect=inspect)
    bytes_now = {
        count: torch.cuda.memory_stats()[f"{count}_bytes.all.current"]
        for count in ("active", "allocated")
    }
    waiting = bytes_now["active"] - bytes_now["allocated"]
    assert waiting == 0 < held[0], f"{waiting} bytes wait for a stream"


class Jitter(torch.autograd.Function):
    """The identity; now and then the stream takes its time, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        sleep_on_stream(random.choice((0, 0, CYCLES // 4)))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sleep_on_stream(random.choice((0, 0, CYCLES // 4)))
        return gradient


class Jittering(nn.Module):
    """Takes its time, and reads a buffer that all chunks share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Jitter.apply(x) + self.shift.to(x.dtype)
        return y


def slow_llama() -> Any:
    """Dropout, a batch of five, a mask."""
    model, make_batch = chunks.llama()
    for block in model.model.layers:
        block.mlp = nn.Sequential(Jittering(), block.mlp)
    return model, make_batch


PLACES: list[dict[str, Any]] = [
    {"window": 1, "resident_layers": 0},
    {"window": 2, "resident_layers": 1},
    {"resident_layers": "all", "resident_updates": "gpu"},
]


@functools.cache
def in_chunks(precision: str, clipping: float, accumulation: int) -> Run:
    """On one stream; a plain loop is the oracle on the CPU (`tests/laws/test_chunks.py`)."""
    return train_chunks(precision, clipping, accumulation, **PLACES[2], activations="keep")


def train_chunks(precision: str, clipping: float, accumulation: int, **section: Any) -> Run:
    settings = config(
        precision=precision,
        clipping=clipping,
        accumulation=accumulation,
        section={"device": "cuda", "chunk": 1, **section},
    )
    return train_windowed(slow_llama, steps=3, settings=settings)


@pytest.mark.parametrize(
    ("streams", "policy", "place", "precision", "clipping", "accumulation"),
    [  # every two of these meet
        (1, "keep", 0, "fp32", 0.5, 1),
        (1, "recompute_offload", 1, "bf16", 0.0, 2),
        (2, "keep", 1, "fp32", 0.0, 2),
        (2, "offload", 0, "bf16", 0.5, 1),
        (2, "attention", 1, "bf16", 0.5, 1),
        (2, "attention_offload", 2, "fp32", 0.0, 1),
        (2, "recompute", 0, "fp32", 0.5, 2),
        (2, "recompute_offload", 0, "bf16", 0.0, 1),
        (3, "keep", 2, "bf16", 0.0, 1),
        (3, "offload", 1, "fp32", 0.0, 2),
        (3, "attention", 0, "fp32", 0.0, 1),
        (3, "attention_offload", 0, "bf16", 0.5, 2),
        (3, "recompute", 2, "bf16", 0.0, 1),
        (3, "recompute_offload", 2, "fp32", 0.5, 1),
    ],
)
def test_streams_and_places_of_chunks_never_change_a_bit(
    streams: int,
    policy: str,
    place: int,
    precision: str,
    clipping: float,
    accumulation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offload_small(monkeypatch)
    run = train_chunks(
        precision, clipping, accumulation, streams=streams, activations=policy, **PLACES[place]
    )
    expected = in_chunks(precision, clipping, accumulation)
    assert_identical(run, expected)
    assert run.norms == expected.norms


RANK_PROGRAMS = "tests.support.rank_programs"


def ranks_on_gpus() -> dict[str, str]:
    """The environment in which each rank finds a GPU of its own."""
    pretended = {
        "STRONGHOLD_PRETENDED": "1",
        "STRONGHOLD_PRETENDED_LAUNCH_DELAY_S": "3e-4",
        "PYTHONPATH": str(ROOT / "tests/pretended/site"),
        "LOCAL_RANK": "0",
    }
    return {"DS_ACCELERATOR": "cuda", **(pretended if PRETENDED else {})}


@pytest.mark.skipif(
    not PRETENDED and torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"
)
def test_streams_of_two_ranks_never_change_a_bit(tmp_path: Path) -> None:
    """Gradients are reduced beside them."""
    for two, one in run_ranks(f"{RANK_PROGRAMS}:streams", 2, tmp_path, **ranks_on_gpus()):
        assert_identical(two, one)
        assert two.norms == one.norms


@pytest.mark.skipif(
    not PRETENDED and torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"
)
def test_the_communicator_is_made_before_the_plan_and_the_lanes(tmp_path: Path) -> None:
    """The plan begins with what it leaves of the device."""
    environment = ranks_on_gpus()
    for found in run_ranks(f"{RANK_PROGRAMS}:communicators", 2, tmp_path, **environment):
        assert "reduce" not in found["counted"]  # no layer was reduced yet
        assert found["budget"] <= GPU_SHARE * (found["before"] - found["taken"])
        if PRETENDED:
            assert found["taken"] == COMMUNICATOR_BYTES  # to reduce
        else:
            assert found["taken"] > 0


class Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1, device="cuda")
        return x


def test_the_trial_of_a_block_draws_none_of_the_devices_numbers() -> None:
    model, make_batch = chunks.llama()
    for block in model.model.layers:
        block.mlp = nn.Sequential(Drawing(), block.mlp)
    batch = on(torch.device("cuda"), make_batch(0))
    num_draws = len(model.model.layers) * len(batch["input_ids"])
    model.eval()
    settings = config(section={"device": "cuda", "chunk": 1, **STREAMED, "activations": "keep"})
    engine = initialized(model, settings)
    torch.cuda.manual_seed(5)
    loss = loss_of(engine(**batch))
    drawn = torch.cuda.get_rng_state()
    engine.backward(loss)
    engine.destroy()
    torch.cuda.manual_seed(5)
    for _ in range(num_draws):
        torch.rand(1, device="cuda")
    assert torch.equal(drawn, torch.cuda.get_rng_state())


class Writing(nn.Module):
    """Makes a table in its first forward, or writes into an argument that all chunks get."""

    def __init__(self, kind: str, attention: nn.Module) -> None:
        super().__init__()
        self.kind = kind
        self.attention = attention
        self.table: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cos, _ = kwargs["position_embeddings"]
        if self.kind == "table" and self.table is None:
            self.table = cos.clone()
        elif self.kind == "argument" and self.training:
            cos.mul_(0.5)
        return self.attention(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "streams", "refusal"),
    [
        ("argument", 1, r"stronghold\.chunk: model\.layers\.1 writes into"),
        ("argument", 2, r"stronghold\.streams: model\.layers\.1 writes into"),
        ("table", 1, None),
        ("table", 2, r"stronghold\.streams: model\.layers\.1 changes Writing\.table"),
    ],
)
def test_what_all_chunks_read_none_may_write(kind: str, streams: int, refusal: str | None) -> None:
    """A table that the first one makes is the same for all, but not beside it on a stream."""

    def writing_llama() -> Any:
        model, make_batch = chunks.llama()
        model.model.layers[1].self_attn = Writing(kind, model.model.layers[1].self_attn)
        return model, make_batch

    settings = config(section={"device": "cuda", "chunk": 1, "streams": streams})
    refused = pytest.raises(ConfigError, match=refusal) if refusal else contextlib.nullcontext()
    with refused:
        train_windowed(writing_llama, steps=1, settings=settings)


def test_a_penalty_on_weights_that_rest_on_the_host_is_refused() -> None:
    """Autograd's thread of the CPU brings its gradient beside that of the device."""
    model, make_batch = MODELS["gpt"]()
    section = {"device": "cuda", "window": 1, "resident_layers": 0}
    engine = stronghold.initialize(model=model, config=config(section=section))[0]
    try:
        loss = loss_of(engine(**on(torch.device("cuda"), make_batch(0))))
        weight = next(model.blocks[0].parameters())
        with pytest.raises(ConfigError, match=r"came on the CPU.*stronghold.resident_layers"):
            engine.backward(loss + 0.1 * weight.square().sum())
    finally:
        engine.destroy()


@pytest.mark.parametrize("updates", ["host", "gpu"])
def test_a_batch_that_is_sent_to_the_models_device_trains(updates: str) -> None:
    """Before the first step and after it, wherever the embedding rests."""
    model, make_batch = llama()
    before = vars(nn.Parameter).keys()
    section = {"device": "cuda", "window": 1, "resident_updates": updates}
    engine = initialized(model, config(precision="bf16", section=section))
    for number in range(2):
        device = next(model.parameters()).device
        assert (device, model.device) == (engine.device, engine.device)
        engine.backward(loss_of(engine(**on(device, make_batch(number)))))
        engine.step()
    engine.offload_states()
    assert model.device.type == "cpu"
    engine.reload_states()
    assert model.device == engine.device
    engine.destroy()
    assert model.device.type == "cpu"
    assert vars(nn.Parameter).keys() == before


@pytest.mark.parametrize("streams", [1, 2])
def test_two_chunks_compute_at_once_on_two_streams(streams: int, tmp_path: Path) -> None:
    """In forward, and where a block runs again. Autograd's operations have no row in the trace."""

    def inspect(engine: Any) -> None:
        device = engine.inspect().device
        for _ in range(2):  # before the first, classes of blocks are tried
            device.settle()
            num_before = len(device.trace.spans())
            engine.backward(loss_of(engine(**on(torch.device("cuda"), slow_llama()[1](0)))))
            engine.step()
        torch.cuda.synchronize()
        device.settle()
        spans = [s for s in device.trace.spans()[num_before:] if s.lane.startswith("compute ")]
        at_once = [
            (one.name, other.name)
            for one, other in itertools.combinations(spans, 2)
            if one.start_s < other.end_s and other.start_s < one.end_s
        ]
        assert {s.lane for s in spans} == (set() if streams == 1 else {"compute 1", "compute 2"})
        assert bool(at_once) == (streams > 1)

    section = {"device": "cuda", "chunk": 1, "streams": streams, "activations": "recompute"}
    section["trace"] = str(tmp_path / "trace.json")
    settings = config(section={**section, **PLACES[0]})
    train_windowed(slow_llama, steps=1, settings=settings, inspect=inspect)


class Counter(nn.Module):
    """Keeps a tensor that is no buffer, and moves it when it is moved, as torchmetrics' metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.total = fn(self.total)
        return super()._apply(fn, recurse)


def test_a_state_that_a_module_moves_itself_is_where_the_model_computes() -> None:
    model, _ = MODELS["gpt"]()
    counters = [Counter(), Counter()]
    model.register_module("counter", counters[0])
    model.get_submodule("blocks.0").register_module("counter", counters[1])
    engine = initialized(model, config(section={"device": "cuda", "window": 1}))
    assert [counter.total.device.type for counter in counters] == ["cuda", "cuda"]
    engine.offload_states()
    assert [counter.total.device.type for counter in counters] == ["cpu", "cpu"]
    engine.reload_states()
    assert [counter.total.device.type for counter in counters] == ["cuda", "cuda"]
    engine.destroy()
    assert [counter.total.device.type for counter in counters] == ["cpu", "cpu"]
