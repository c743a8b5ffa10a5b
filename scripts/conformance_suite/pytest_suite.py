"""Files of foreign tests that run under pytest, one process for each file.

Owns the command line of such a suite, the processes, the counts and the page. `recorder` writes the
outcomes inside these processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conformance_suite import pretended_gpu
from conformance_suite.explanations import Row, explain
from conformance_suite.pages import FOLDER, table, write_page
from conformance_suite.recorder import ENGINE, OUTCOMES, REFERENCE, SUITE
from conformance_suite.sources import SourcesError, find_sources

SCRIPTS = Path(__file__).resolve().parents[1]
WIDTH = 60  # of a file's name in what is printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The worst phase of one test. `text`: what pytest said, or the reason of a test that was not
    run."""

    test: str
    outcome: str  # "passed", "failed", "skipped" or "not run"
    text: str


@dataclass(slots=True)
class Counts:
    """Counts of tests."""

    passed: int = 0
    cannot_apply: int = 0
    failed: int = 0

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.cannot_apply += other.cannot_apply
        self.failed += other.failed

    def cells(self) -> tuple[int, int, int]:
        return self.passed, self.cannot_apply, self.failed


@dataclass(slots=True)
class Report:
    """Counts by file, the tests that pass, the reason of each that cannot apply, and the tests
    that nothing explains."""

    files: dict[str, Counts] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    reason_of: dict[str, str] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    @property
    def reasons(self) -> Counter[str]:
        return Counter(self.reason_of.values())

    @property
    def in_all(self) -> Counts:
        total = Counts()
        for counts in self.files.values():
            total.add(counts)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestSuite:
    """One suite.

    name          of the suite, its folder and its page
    project       for people: "DeepSpeed"
    package       distribution whose installed version is tested
    about         one line for --help
    page          the page says this after the version: which tests, how they run
    marker        path that shows that a folder holds the tests
    from_index    the source distribution on the package index has the tests
    folder        of the sources; pytest runs there
    prefix        of each file's path from `folder`; names of tests are written without it
    files         files of tests, from folder / prefix
    rows          explanations
    reasons       texts of the reasons
    title         of the page, before "against this engine"; absent: the project's tests
    plugin        module of the pytest plugin that puts the engine into the tests' process
    environment   further variables of the tests' processes
    gpu_files     files that run on the pretended GPU, though the others do not; with the project's
                  own engine they stay on the CPU
    options       further options of pytest
    limit_s       time limit of one file
    has_reference the tests can run with the project's own engine, too
    """

    name: str
    project: str
    package: str
    about: str
    page: str
    marker: Path
    folder: Path
    prefix: str
    files: tuple[str, ...]
    rows: tuple[Row, ...]
    reasons: Mapping[str, str]
    plugin: str
    title: str = ""
    from_index: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu_files: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()
    limit_s: float = 900.0
    has_reference: bool = False

    # -- command line ------------------------------------------------------------------------------
    def run(self, given: list[str]) -> int:
        """Run the suite. Returns 1 if a test fails and nothing explains it."""
        arguments = self._parse(given)
        version = importlib.metadata.version(self.package)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                sources = find_sources(
                    arguments.sources,
                    distribution=self.package if self.from_index else None,
                    version=version,
                    marker=self.marker,
                    scratch=Path(scratch),
                )
            except SourcesError as error:
                print(f"conformance {self.name}: error: {error}", file=sys.stderr)
                return 2
            print(f"{self.project} {version}, tests of {sources}")
            if arguments.reference:
                self._run_reference(sources, arguments.only, arguments.results)
                return 0
            report = self._run_files(sources, arguments.only, arguments.results)
            tests_of = self._version_of(sources)
        self._print(report)
        if arguments.page:
            reference = self._passed_by_reference(arguments.beside)
            lines = self._page(report, version, tests_of, reference)
            write_page(self.name, lines, arguments.page_folder)
        return 1 if report.unexplained else 0

    def _parse(self, given: list[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"conformance {self.name}", description=self.about)
        where = f"a folder that holds {self.marker}"
        if self.from_index:
            where += ", or the source distribution; pip downloads it if it is absent"
        parser.add_argument("sources", type=Path, nargs="?", help=where)
        parser.add_argument("--only", default="", help="files whose name contains this")
        parser.add_argument("--results", type=Path, help="a folder that keeps outcomes")
        parser.add_argument("--page", action="store_true", help=f"write {self.name}.md")
        parser.add_argument("--page-folder", type=Path, default=FOLDER, help="folder of the page")
        if self.has_reference:
            parser.add_argument(
                "--reference", action="store_true", help=f"run {self.project}'s own engine"
            )
            parser.add_argument(
                "--beside", type=Path, help="results of --reference, which the page shows beside"
            )
        parser.set_defaults(reference=False, beside=None)
        return parser.parse_args(given)

    def _version_of(self, sources: Path) -> str:
        """The version of the sources, if they say it."""
        file = sources / "version.txt"
        return file.read_text(encoding="utf-8").strip() if file.exists() else ""

    # -- the project's own engine ------------------------------------------------------------------
    def _run_reference(self, sources: Path, only: str, results: Path | None) -> None:
        """Run the tests with the project's own engine, and print how many pass."""
        suite = dataclasses.replace(
            self,
            rows=(),
            environment={**self.environment, ENGINE: REFERENCE},
            gpu_files=frozenset(),
        )
        report = suite._run_files(sources, only, results)
        print(f"{'in all':{WIDTH}} {report.in_all.passed:4}")

    def _passed_by_reference(self, results: Path | None) -> set[str] | None:
        """Return the tests that passed with the project's own engine. None: it was not run."""
        if results is None:
            return None
        passed = set()
        for file in self.files:
            outcomes = results / outcomes_name(file)
            if not outcomes.exists():
                raise SystemExit(f"conformance {self.name}: error: no {outcomes}")
            for outcome in read_outcomes(file, outcomes, ""):
                if outcome.outcome == "passed":
                    passed.add(outcome.test)
        return passed

    # -- processes ---------------------------------------------------------------------------------
    def _run_files(self, sources: Path, only: str, results: Path | None) -> Report:
        print(f"{'':{WIDTH}} pass  cannot apply  fail", flush=True)
        report = Report()
        for file in self.files:
            if only not in file:
                continue
            if not (sources / self.folder / self.prefix / file).exists():
                print(f"{file:{WIDTH}} is not in these sources")
                continue
            counts = self._count(report, self._outcomes(file, sources, results))
            report.files[file] = counts
            passed, cannot_apply, failed = counts.cells()
            print(f"{file:{WIDTH}} {passed:4} {cannot_apply:13} {failed:5}", flush=True)
        return report

    def _outcomes(self, file: str, sources: Path, results: Path | None) -> list[Outcome]:
        """Run one file. With `results`, its outcomes are kept there, and read if they are there."""
        with tempfile.TemporaryDirectory() as scratch:
            kept = Path(scratch) if results is None else results.resolve()
            kept.mkdir(parents=True, exist_ok=True)
            outcomes = kept / outcomes_name(file)
            said = ""
            if not outcomes.exists():
                outcomes.touch()
                said = self._run_file(file, sources, outcomes, scratch)
            return read_outcomes(file, outcomes, said)

    def _run_file(self, file: str, sources: Path, outcomes: Path, scratch: str) -> str:
        """Run one file under pytest. Returns the end of what pytest said."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "conformance_suite.recorder"]
        command += ["-p", self.plugin, "-p", "no:cacheprovider", "--basetemp", f"{scratch}/tmp"]
        command += [*self.options, f"{self.prefix}{file}"]
        try:
            done = subprocess.run(
                command,
                cwd=sources / self.folder,
                env=self._environment(file, outcomes),
                timeout=self.limit_s,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {self.limit_s:.0f} s"
        return done.stdout[-2000:] + done.stderr[-2000:]

    def _environment(self, file: str, outcomes: Path) -> dict[str, str]:
        """Return the environment of one file: this process's, with the plugin and stronghold to be
        found."""
        path = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29533",
            **(pretended_gpu.environment() if file in self.gpu_files else {}),
            **self.environment,
            SUITE: self.name,
            OUTCOMES: str(outcomes),
        }

    # -- counts ------------------------------------------------------------------------------------
    def _count(self, report: Report, outcomes: list[Outcome]) -> Counts:
        """Count the outcomes of one file. Reasons and unexplained tests go into the report."""
        counts = Counts()
        for outcome in outcomes:
            if outcome.outcome == "passed":
                counts.passed += 1
                report.passed.add(outcome.test)
                continue
            reason: str | None = outcome.text
            if outcome.outcome != "not run":
                reason = explain(self.rows, outcome.test, outcome.text)
            if reason is None:
                counts.failed += 1
                report.unexplained.append(f"{outcome.test}: {first_error(outcome.text)}")
            else:
                counts.cannot_apply += 1
                report.reason_of[outcome.test] = reason
        return counts

    def _print(self, report: Report) -> None:
        passed, cannot_apply, failed = report.in_all.cells()
        print(f"{'in all':{WIDTH}} {passed:4} {cannot_apply:13} {failed:5}")
        print("\nCannot apply:")
        for reason, count in report.reasons.most_common():
            print(f"{count:5}  {self.reasons[reason]}")
        if report.unexplained:
            print("\nUnexplained:", *report.unexplained, sep="\n  ")

    def _page(
        self, report: Report, version: str, tests_of: str, reference: set[str] | None
    ) -> list[str]:
        """Return the lines of the page.

        tests_of   version of the sources, if it is known
        reference  the tests that pass with the project's own engine, if it was run
        """
        files = [(f"`{file}`", *counts.cells()) for file, counts in report.files.items()]
        files.append(("in all", *report.in_all.cells()))
        title = self.title or f"{self.project}'s tests"
        known = f"{self.project} {version}"
        if tests_of and tests_of != version:
            known += f", tests of {tests_of}"
        return [
            f"# {title}, against this engine",
            "",
            f"Written by `scripts/conformance {self.name} --page`: {known}.",
            self.page,
            "",
            *table(("file", "pass", "cannot apply", "fail"), files, "lrrr"),
            "",
            *([] if reference is None else self._beside(report, reference)),
            "## Why a test cannot apply",
            "",
            *self._reasons_table(report, reference),
        ]

    def _beside(self, report: Report, reference: set[str]) -> list[str]:
        """Lines of the page: how many tests the project's own engine passes."""
        cannot_apply = len(reference & set(report.reason_of))
        both = len(reference & report.passed)
        return [
            f"## Beside {self.project}'s own engine",
            "",
            f"With {self.project}'s own engine {len(reference)} of these tests pass in the same "
            "processes.",
            f"Of them {both} pass here, and {cannot_apply} cannot apply: "
            f"{cannot_apply / max(1, len(reference)):.0%}.",
            "The others fail there too, or are skipped.",
            "",
        ]

    def _reasons_table(self, report: Report, reference: set[str] | None) -> list[str]:
        """Lines of the page: the reasons, with the number of their tests."""
        counts = report.reasons.most_common()
        if reference is None:
            rows = [(count, self.reasons[key]) for key, count in counts]
            return table(("tests", "reason"), rows, "rl")
        passed = Counter(reason for test, reason in report.reason_of.items() if test in reference)
        beside = [(count, passed[key], self.reasons[key]) for key, count in counts]
        return table(("tests", f"{self.project} passes", "reason"), beside, "rrl")


def outcomes_name(file: str) -> str:
    """The name under which the outcomes of a file of tests are kept."""
    return f"{file.replace('/', '_')}.jsonl"


def read_outcomes(file: str, outcomes: Path, said: str) -> list[Outcome]:
    """Return the worst phase of each test, from the recorder's lines.

    A test that began and has no outcome has failed, and so has a file without tests. `said`: the
    end of what pytest printed; such a test has no other text.
    """
    worst: dict[str, Outcome] = {}
    for line in outcomes.read_text(encoding="utf-8").splitlines():
        outcome = Outcome(**json.loads(line))
        before = worst.get(outcome.test)
        if before is None or before.outcome in ("begun", "passed"):
            worst[outcome.test] = outcome
    if not worst:
        return [Outcome(test=file, outcome="failed", text=said)]
    ended = []
    for outcome in worst.values():
        if outcome.outcome == "begun":
            ended.append(Outcome(test=outcome.test, outcome="failed", text=said))
        else:
            ended.append(outcome)
    return ended


def first_error(text: str) -> str:
    """Return the line of a failure that says most."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines[-1:] or ["nothing was said"])[0][:160]
