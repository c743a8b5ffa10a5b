"""Laws of the step's counters."""

from __future__ import annotations

import pytest
import torch

from stronghold.telemetry.metrics import Metrics, WaitCause, batch_size, read_number, tflops


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def end(metrics: Metrics, step: int = 1, **changes: object):  # type: ignore[no-untyped-def]
    readings = {"loss": 2.0, "grad_norm": 0.5, "learning_rate": 1e-3, **changes}
    return metrics.end_step(step=step, **readings)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_counters_cover_exactly_one_step(clock: Clock) -> None:
    metrics = Metrics(num_parameters=10**9, clock=clock)
    metrics.add_tokens(100)
    metrics.add_tokens(300)
    metrics.waited(WaitCause.FETCH, 0.25)
    metrics.waited(WaitCause.FETCH, 0.25)
    metrics.waited(WaitCause.UPDATE, 1.0)
    clock.now_s += 2.0
    first = end(metrics)
    assert (first.step_s, first.tokens_per_s) == (2.0, 200.0)
    assert (first.wait_fetch_s, first.wait_offload_s, first.wait_update_s) == (0.5, 0.0, 1.0)
    clock.now_s += 4.0
    metrics.add_tokens(100)
    clock.now_s += 1.0
    second = end(metrics, step=2)
    # From end to end: what an asynchronous device does between two steps is counted too.
    assert (second.step_s, second.tokens_per_s) == (5.0, 20.0)
    assert (second.wait_fetch_s, second.wait_update_s) == (0.0, 0.0)


def test_time_before_the_first_tokens_and_after_a_restart_is_not_training(clock: Clock) -> None:
    metrics = Metrics(num_parameters=1, clock=clock)
    clock.now_s += 50.0
    metrics.add_tokens(1)
    clock.now_s += 1.0
    assert end(metrics).step_s == 1.0
    clock.now_s += 50.0  # an evaluation
    metrics.restart_clock()
    metrics.add_tokens(1)
    clock.now_s += 1.0
    metrics.restart_clock()  # between two micro-batches of a step it changes nothing
    assert end(metrics, step=2).step_s == 1.0


def test_tflops_are_the_fields_formula() -> None:
    billions, seq, global_batch, seconds = 1.717, 1024, 4, 5.991
    for recomputes, k in ((False, 3), (True, 4)):
        expected = billions * k * 2 * seq * global_batch / (seconds * 1 * 1e3)
        assert tflops(int(billions * 1e9), seq * global_batch, seconds, recomputes) == (
            pytest.approx(expected)
        )
    assert tflops(10, 10, 0.0, False) == 0.0


def test_a_loss_is_read_when_its_line_is_formatted_and_not_before(clock: Clock) -> None:
    reads = []

    def loss() -> float:
        reads.append(clock.now_s)
        return 1.25

    metrics = Metrics(num_parameters=25_000_000, clock=clock)
    metrics.add_tokens(1024)
    clock.now_s += 0.5
    record = end(metrics, loss=loss, grad_norm=torch.tensor(3.0), step=7)
    assert reads == []
    line = metrics.format(record)
    assert len(reads) == 1
    assert "\n" not in line
    for part in ("step 7", "loss 1.2500", "grad norm 3.000", "lr 1.00e-03", "2,048 tokens/s"):
        assert part in line
    assert "skipped" not in line


def test_waits_of_a_stream_are_read_like_a_loss_and_unknown_ones_are_no_number(
    clock: Clock,
) -> None:
    metrics = Metrics(num_parameters=1, clock=clock)
    passed: list[str] = []

    def later() -> float:
        passed.append("read")
        return 0.25

    metrics.waited(WaitCause.FETCH, later)
    metrics.waited(WaitCause.FETCH, 0.5)
    metrics.waited(WaitCause.OFFLOAD, None)
    metrics.waited(WaitCause.OFFLOAD, 0.5)
    record = end(metrics)
    assert passed == []
    assert "waited ms: fetch 750.0, offload -, update 0.0" in metrics.format(record)
    assert passed == ["read"]


def test_a_record_holds_no_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    record = end(Metrics(num_parameters=1), loss=weight.sum())
    assert isinstance(record.loss, torch.Tensor)
    assert record.loss.grad_fn is None
    assert read_number(record.loss) == 3.0
    assert read_number(None) is None


def test_a_skipped_step_says_so() -> None:
    metrics = Metrics(num_parameters=1)
    line = metrics.format(end(metrics, skipped=True, loss=None, grad_norm=float("inf")))
    assert "skipped" in line
    assert "loss -" in line
    assert "grad norm inf" in line


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {"input_ids": torch.zeros(2, 7, dtype=torch.long)}, 14),
        (({"labels": torch.zeros(3, 9).long(), "input_ids": torch.zeros(2, 7).long()},), {}, 14),
        ((torch.zeros(4, 5, dtype=torch.int32), torch.zeros(8, 8).long()), {}, 20),
        ((torch.zeros(4, 5),), {"mask": torch.zeros(9, 9, dtype=torch.bool)}, 9),
        ((torch.zeros(0, 5).long(),), {}, 0),
        ((torch.tensor(1.0), "text", None), {}, 0),
    ],
)
def test_tokens_are_counted_in_any_batch(
    args: tuple[object, ...], kwargs: dict[str, object], expected: int
) -> None:
    assert batch_size(args, kwargs).tokens == expected
