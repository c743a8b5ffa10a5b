"""Laws of the trace, its file, and its pictures."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from stronghold.errors import ConfigError
from stronghold.telemetry import trace
from stronghold.telemetry.trace import Span, Trace
from stronghold.tools import timeline

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def recorded_step(lanes: Trace, step: int, start_s: float) -> None:
    """One step of two layers, 8 ms long."""
    ms = 1e-3
    lanes.record("fetch", "fetch 1", start_s, start_s + 1 * ms, bytes=4096)
    lanes.record("compute", "forward 0", start_s, start_s + 2 * ms)
    lanes.record("compute", "forward 1", start_s + 2 * ms, start_s + 4 * ms)
    lanes.record("compute", "backward 1", start_s + 4 * ms, start_s + 6 * ms)
    lanes.record("compute", "backward 0", start_s + 6 * ms, start_s + 8 * ms)
    lanes.record("offload", "offload 1", start_s + 6 * ms, start_s + 7 * ms)
    lanes.record("update", "update 1", start_s + 7 * ms, start_s + 9 * ms)
    lanes.record("step", f"step {step}", start_s, start_s + 8 * ms)


@pytest.fixture
def three_steps(tmp_path: Path) -> Path:
    lanes = Trace()
    origin = time.perf_counter()
    for step in (1, 2, 3):
        recorded_step(lanes, step, origin + step * 8e-3)
    lanes.write(tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_a_written_trace_reads_back_as_recorded(tmp_path: Path) -> None:
    lanes = Trace()
    start = time.perf_counter()
    lanes.record("update", "update 3", start + 0.5, start + 0.75, bytes=17)
    lanes.record("fetch", "fetch 2", start, start + 0.25)
    lanes.write(tmp_path / "trace.json")
    first, second = trace.read(tmp_path / "trace.json")
    assert (first.lane, first.name, first.kind, first.args) == ("fetch", "fetch 2", "fetch", {})
    assert (second.lane, second.name, second.args) == ("update", "update 3", {"bytes": 17})
    # The file keeps nanoseconds.
    assert first.duration_s == pytest.approx(0.25, abs=1e-8)
    assert second.start_s - first.start_s == pytest.approx(0.5, abs=1e-8)


def test_no_span_is_lost_when_many_threads_record(tmp_path: Path) -> None:
    lanes = Trace()

    def work(lane: str) -> None:
        for layer in range(500):
            lanes.record(lane, f"fetch {layer}", 0.0, 1.0)

    threads = [threading.Thread(target=work, args=(f"lane {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    lanes.write(tmp_path / "early.json")  # while the others record
    for thread in threads:
        thread.join()
    lanes.write(tmp_path / "trace.json")
    spans = trace.read(tmp_path / "trace.json")
    assert len(spans) == 2000
    assert len({(span.lane, span.name) for span in spans}) == 2000


def test_writing_replaces_the_file_and_leaves_no_other(tmp_path: Path, three_steps: Path) -> None:
    Trace().write(three_steps)
    assert trace.read(three_steps) == []
    assert list(tmp_path.iterdir()) == [three_steps]


def test_a_run_of_any_length_keeps_the_newest_operations_alone() -> None:
    lanes = Trace(newest=100)
    kept = []
    for k in range(1050):
        lanes.record("fetch", f"fetch {k}", float(k), k + 1.0)
        kept.append(len(lanes.spans()))
        assert lanes.spans()[-1].name == f"fetch {k}"
    assert max(kept) == 200
    newest = [span.name for span in lanes.spans()[-100:]]
    assert newest == [f"fetch {k}" for k in range(950, 1050)]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("", "not a trace"), ("[]", "not a trace"), ("{}", "not a trace")],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        trace.read(path)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What is drawn, in place of files."""
    drawn: list[Figure] = []
    monkeypatch.setattr(timeline, "save", lambda figure, png: drawn.append(figure))
    return drawn


def test_a_timeline_shows_the_last_step_unless_told_otherwise(
    three_steps: Path, figures: list[Figure]
) -> None:
    spans = trace.read(three_steps)
    for extent, title, length_ms, num_boxes in [
        ({}, "step 3, 8.0 ms", 8.0, 8),  # an update of the step before goes on in it
        ({"step": 1}, "step 1, 8.0 ms", 8.0, 7),
    ]:
        timeline.draw_timeline(spans, "timeline.png", **extent)
        figure = figures.pop()
        (axes,) = figure.axes
        assert figure.get_suptitle() == title
        assert axes.get_xlim() == pytest.approx((0.0, length_ms), abs=1e-3)
        assert sum(len(boxes.get_paths()) for boxes in axes.collections) == num_boxes


def test_a_timeline_is_a_png(tmp_path: Path, three_steps: Path) -> None:
    timeline.draw_timeline(trace.read(three_steps), tmp_path / "new folder" / "timeline.png")
    assert (tmp_path / "new folder" / "timeline.png").read_bytes().startswith(PNG_MAGIC)


def test_a_lane_is_busy_for_the_union_of_its_spans_and_not_while_it_waits(
    figures: list[Figure],
) -> None:
    def span(name: str, start_s: float, end_s: float) -> Span:
        return Span(lane="compute", name=name, start_s=start_s, end_s=end_s)

    spans = [span("forward 0", -1, 2), span("forward 1", 1, 3), span("wait fetch 2", 3, 8)]
    spans.append(Span(lane="step", name="step 1", start_s=0.0, end_s=10.0))
    timeline.draw_timeline(spans, "timeline.png")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute\n30% busy"]


def test_what_has_no_operations_is_refused(tmp_path: Path, three_steps: Path) -> None:
    with pytest.raises(ConfigError, match="steps 1 to 3"):
        timeline.draw_timeline(trace.read(three_steps), tmp_path / "timeline.png", step=9)
    alone = Span(lane="step", name="step 1", start_s=0.0, end_s=1.0)
    with pytest.raises(ConfigError, match=r"step 1, .* has no operations"):
        timeline.draw_timeline([alone], tmp_path / "timeline.png")
    with pytest.raises(ConfigError, match="no operations"):
        timeline.draw_timeline([], tmp_path / "timeline.png")
