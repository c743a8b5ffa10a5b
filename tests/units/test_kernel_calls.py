"""Laws of calls of the native kernels: pools of threads, instruction sets, bad input."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from stronghold import native
from stronghold.errors import ConfigError, StateError
from tests.support.kernel_arrays import BF16, F32, Arrays, same, values
from tests.support.optimizers import OPTIMIZERS

# ---- Pools and bad input --------------------------------------------------------------------


def test_calls_from_many_threads_on_one_pool_take_turns():
    jobs = [Arrays(values(50_000, i), values(50_000, 9 - i), F32) for i in range(4)]
    expected = [Arrays(values(50_000, i), values(50_000, 9 - i), F32) for i in range(4)]
    with native.Pool(3) as pool:
        threads = [threading.Thread(target=job.run, args=(pool, range(1, 6))) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for arrays in expected:
            arrays.run(pool, range(1, 6))
    assert all(same(a, b) for a, b in zip(jobs, expected, strict=True))


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_pools_leave_no_thread_and_no_affinity_behind():
    before, mask = threads(), os.sched_getaffinity(0)
    core = min(mask)
    pools = [native.Pool(3), native.Pool(2, cores=[core])]
    begun = threads() - before
    assert len(begun) == 3
    for pool in pools:
        Arrays(values(80_000, 0), values(80_000, 1), F32).run(pool)
        assert pool.num_threads in (2, 3)
        pool.close()
        pool.close()
    assert not threads() & begun
    assert os.sched_getaffinity(0) == mask
    with pytest.raises(StateError, match="closed"):
        pools[0].sum_squares(F32, [])


def test_a_forked_child_is_refused_and_does_not_hang():
    pool = native.Pool(2)
    child = os.fork()
    if child == 0:
        try:
            pool.sum_squares(F32, [])
        except ConfigError as error:
            pool.close()
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


FORCED = [*native.isas(), "", "sse9"]
SHOW_ISAS = """
import os, sys
import torch  # once: it takes seconds
for isa in sys.argv[1:]:
    if os.fork() == 0:  # the library reads its environment once
        os.environ["STRONGHOLD_ISA"] = isa
        try:
            from stronghold import native
            print(native.isa(), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def forced():
    """What a process runs under each value of the variable."""
    command = [sys.executable, "-c", SHOW_ISAS, *FORCED]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(FORCED, result.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("isa", FORCED)
def test_environment_forces_the_instruction_set(isa, forced):
    if isa == "sse9":
        assert forced[isa].startswith('ConfigError: STRONGHOLD_ISA is "sse9"; this CPU runs')
    else:
        assert forced[isa] == (isa or native.isas()[0])


BAD_NUMBERS = {
    "adam": {
        "beta1": 1.0,
        "beta2": math.nan,
        "eps": -1.0,
        "lr": math.inf,
        "weight_decay": math.nan,
    },
    "lion": {"beta1": -0.1, "beta2": 1.0, "lr": math.nan, "weight_decay": math.inf},
    "sgd_momentum": {"lr": math.inf, "momentum": -0.1, "weight_decay": math.nan},
    "sgd": {"lr": math.nan, "momentum": 0.9, "weight_decay": math.inf},
}
BAD_FIELDS = [
    *(
        (optimizer, {name: value})
        for optimizer, bad in BAD_NUMBERS.items()
        for name, value in bad.items()
    ),
    *((optimizer, {name: 0}) for optimizer in OPTIMIZERS for name in ("weight", "low", "grad")),
    *(
        (optimizer, {f"moment{k}": 0})
        for optimizer, hyper in OPTIMIZERS.items()
        for k in range(hyper.num_moments)
    ),
    ("adam", {"step": 0}),
    ("lion", {"numel": -1}),
    ("sgd_momentum", {"momentum": math.inf}),
    ("sgd_momentum", {"momentum": math.nan}),
]


@pytest.mark.parametrize(("optimizer", "changes"), BAD_FIELDS, ids=str)
def test_a_bad_segment_is_named_and_nothing_is_updated(optimizer, changes):
    good, bad, untouched = (
        Arrays(torch.ones(17), torch.ones(17), BF16, optimizer=optimizer) for _ in range(3)
    )
    message = f"segment 1: {next(iter(changes))} "
    with native.Pool(1) as pool, pytest.raises(ConfigError, match=message):
        pool.update(optimizer, BF16, F32, [good.segment(), bad.segment(**changes)])
    assert same(good, untouched)


def test_every_optimizers_numbers_are_tried():
    assert native.optimizers() == list(OPTIMIZERS) == list(BAD_NUMBERS)


def test_bad_pools_and_dtypes_are_refused():
    for arguments in ({"num_threads": 0}, {"num_threads": 1, "cores": []}):
        with pytest.raises(ConfigError):
            native.Pool(**arguments)
    with pytest.raises(ConfigError, match="core"):
        native.Pool(1, cores=[-1])
    with pytest.raises(OSError, match="core list"):
        native.Pool(1, cores=[1023])
    with pytest.raises(ConfigError, match="float64"), native.Pool(1) as pool:
        pool.sum_squares(torch.float64, [])


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    arrays = Arrays(torch.ones(17), torch.ones(17), F32)
    known = ", ".join(native.optimizers())
    with native.Pool(1) as pool:
        for call in (
            lambda: pool.update("adamant", F32, F32, [arrays.segment()]),
            lambda: pool.prefetch("adamant", F32, F32),
            lambda: native.UpdateBatch("adamant", F32, F32, [arrays.segment()]).traffic(pool),
            lambda: native.constants("adamant", [arrays.segment()]),
        ):
            with pytest.raises(ConfigError, match=f'optimizer is "adamant"; .* have {known}'):
                call()


# ---- Constants ------------------------------------------------------------------------------


def constants_of(optimizer: str, step: int, **numbers: float) -> tuple[list[float], int]:
    arrays = Arrays(torch.ones(1), torch.ones(1), F32, optimizer=optimizer)
    segment = arrays.segment(step, grad_scale=0.37, **numbers)
    constants, variant = native.constants(optimizer, [segment])
    return constants[0].tolist(), int(variant[0])


def rounded(*values: float) -> list[float]:
    padding = [0.0] * (native.MAX_CONSTANTS - len(values))
    return [*np.float32(values).tolist(), *padding]


def test_adams_constants_are_computed_in_double_and_rounded_once():
    lr, beta1, beta2, eps, decay, step = 3e-4, 0.9, 0.999, 1e-8, 0.1, 7
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
    factors = (decay, 1.0 - lr * decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2)
    root = 1.0 / math.sqrt(1.0 - math.pow(beta2, step))
    expected = rounded(0.37, *factors, root, eps, -lr / (1.0 - math.pow(beta1, step)))
    assert constants_of("adam", step, **numbers) == (expected, 1)


def test_lions_constants_are_computed_in_double_and_rounded_once():
    lr, beta1, beta2, decay = 3e-4, 0.9, 0.99, 0.1
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": decay}
    expected = rounded(0.37, 1.0 - lr * decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, -lr)
    assert constants_of("lion", 0, **numbers) == (expected, 0)


def test_sgds_constants_are_rounded_once():
    numbers = {"lr": 3e-4, "weight_decay": 0.1}
    plain = rounded(0.37, 0.1, -3e-4)
    assert constants_of("sgd", 0, **numbers) == (plain, 0)
    for nesterov in (0, 1):
        flags = {"momentum": 0.9, "nesterov": nesterov}
        expected = rounded(0.37, 0.1, -3e-4, 0.9)
        assert constants_of("sgd_momentum", 0, **numbers, **flags) == (expected, nesterov)


def test_constants_follow_flags_and_name_the_variant():
    arrays = Arrays(torch.ones(1), torch.ones(1), F32)
    segments = [
        arrays.segment(3, adamw=True),
        arrays.segment(3, adamw=False),
        arrays.segment(3, adamw=False, weight_decay=0.0),
        arrays.segment(0, bias_correction=False),
    ]
    constants, variant = native.constants("adam", segments)
    assert variant.tolist() == [1, 0, 1, 1]
    assert constants[3, [7, 9]].tolist() == [1.0, np.float32(-1e-3)]
    assert native.constants("adam", [])[0].shape == (0, native.MAX_CONSTANTS)


def test_constants_refuse_what_the_update_refuses():
    arrays = Arrays(torch.ones(1), torch.ones(1), F32)
    segments = [arrays.segment(), arrays.segment(beta2=1.0)]
    with pytest.raises(ConfigError, match="segment 1: beta2 must be in"):
        native.constants("adam", segments)
