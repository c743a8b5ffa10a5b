"""Files in the root that outsiders expect: each parses, and what they name exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import stronghold
from stronghold.tools import cli

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# Of a runner, or of the pages that name them.
KNOWN_TOOLS = {"pip", "pipx", "pre-commit", "docker", "git", "grep"}
PAGES = ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"]


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def project(key: str) -> str:
    """A string of pyproject.toml. Python 3.10 has no parser for it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (value,) = re.findall(rf'^{key} = "(.*)"$', text, re.MULTILINE)
    return str(value)


def commands_of(lines: str) -> Iterator[list[str]]:
    """The words of each command of a shell text, without comments."""
    for line in lines.splitlines():
        for command in re.split(r"&&|\|\||;|\|", line):
            words = shlex.split(command, comments=True)
            if words:
                yield words[1:] if words[0] == "." else words


def missing(words: list[str]) -> str:
    """What a command names and does not exist, "" if everything does."""
    if words[0] == "stronghold" or words[0].endswith("bin/stronghold"):
        with pytest.raises(SystemExit) as stopped:
            cli.main([words[1], "--help"])
        return "" if stopped.value.code == 0 else words[1]
    if "/" in words[0] and not words[0].startswith(".venv/"):
        return "" if os.access(ROOT / words[0], os.R_OK) else words[0]
    if words[0].startswith(".venv/"):
        beside = Path(sys.executable).parent / Path(words[0]).name
        return "" if beside.exists() else words[0]
    return "" if words[0] in KNOWN_TOOLS else words[0]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_parses_and_its_commands_exist(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["name"] == path.stem
    assert workflow[True], "on: which events"  # YAML 1.1 reads the word "on" as true
    assert workflow["permissions"] == {"contents": "read"}
    num_commands = 0
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
            for words in commands_of(step.get("run", "")):
                assert missing(words) == ""
                num_commands += 1
        command = job.get("env", {}).get("CIBW_TEST_COMMAND")
        assert command is None or missing(shlex.split(command)) == ""
    assert num_commands > 0


def test_the_tests_run_on_every_python_that_the_package_names() -> None:
    tests = parsed(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["tests"]
    assert tests["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12"]
    assert project("requires-python") == ">=3.10"


def test_a_command_that_does_not_exist_is_seen() -> None:
    for line in ("scripts/absent", ". scripts/absent", "nothing --help", ".venv/bin/nothing"):
        (words,) = commands_of(line)
        assert missing(words) != ""
    assert missing(["stronghold", "tset"]) == "tset"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_has_what_a_form_needs(path: Path) -> None:
    form = parsed(path)
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= form.keys()
    names = [part["id"] for part in form["body"]]
    assert len(names) == len(set(names)) > 0
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "dropdown")
        label = part["attributes"]["label"]
        for command in re.findall(r"stronghold (\w+)", label):
            assert missing(["stronghold", command]) == ""


def test_hooks_run_tools_of_the_environment() -> None:
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert {shlex.split(entry)[0] for entry in entries} == {".venv/bin/ruff", ".venv/bin/mypy"}
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_the_citation_names_this_version_and_the_paper() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == stronghold.__version__
    assert citation["license"] == project("license")
    (paper,) = citation["references"]
    assert paper["year"] == 2022
    names = [f"{author['given-names']} {author['family-names']}" for author in paper["authors"]]
    assert (names[0], names[-1], len(names)) == ("Xiaoyang Sun", "Zheng Wang", 7)


def test_the_image_runs_the_test_of_the_package() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (command,) = [line.removeprefix("CMD ") for line in lines if line.startswith("CMD ")]
    assert yaml.safe_load(command) == ["stronghold", "test"]
    copied = [shlex.split(line)[1] for line in lines if line.startswith("COPY ")]
    assert "constraints.txt" in copied


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert [missing(words) for words in commands_of(block) if missing(words)] == []
    present = re.sub(r"^### Removed$.*?(?=^##|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`stronghold (\w+)", present):
        assert missing(["stronghold", command]) == ""
    named = re.findall(r"`((?:\w+/)+[\w./]*)(?: [^`]*)?`", present)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_changelog_keeps_its_format() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["[Unreleased]"]
    kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert kinds == ["Added", "Changed", "Deprecated", "Removed"]


def test_the_wheel_says_that_it_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    # no kernels
    options = ["-C", "wheel.cmake=false", "-C", f"build-dir={tmp_path / 'build'}"]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *(*options, "--wheel-dir", str(tmp_path / "wheel"), str(ROOT)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "stronghold/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "stronghold",
        f"{wheel.stem.split('-py3')[0]}.dist-info",
    }
