"""The borders between the rooms, as the source shows them: imports, threads, CUDA, prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "stronghold"


def read_levels(page: str) -> dict[str, int]:
    """The level of each room, from the rows `| level | rooms | hold |` of `page`."""
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.MULTILINE)
    pairs = [(room, int(level)) for level, rooms in rows for room in re.findall(r"`(\w+)`", rooms)]
    assert len(pairs) == len({room for room, _ in pairs}), f"a room stands twice: {pairs}"
    return dict(pairs)


LEVELS = read_levels((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
THREAD_MAKERS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def room_of_module(module: str) -> str:
    """`plan` of `stronghold.plan.search`, `__init__` of the package itself."""
    return [*module.split("."), "__init__"][1]


def level(module: str) -> int:
    """The level of a module's room; KeyError for a room that the table does not have."""
    return LEVELS[room_of_module(module)]


def imports(path: Path) -> Iterator[str]:
    """The package's modules that a file imports, wherever in it and for whatever reason."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides the room"
            # `from stronghold.plan import planner` imports a module or a name: both are tried.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "stronghold")


def modules_named(path: Path) -> Iterator[str]:
    """Every module that an import statement of a file names, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def names_used(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every name, attribute and import in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, dotted(node)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_table_has_every_room_and_no_other() -> None:
    assert {room_of_module(module) for module in MODULES} == set(LEVELS)


def test_imports_never_go_up() -> None:
    upward = [
        (module, level(module), name)
        for module, path in MODULES.items()
        for name in imports(path)
        if level(name) > level(module)
    ]
    assert upward == []


def find_cycle(graph: dict[str, set[str]]) -> str:
    """The modules of a circle of imports, "" where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def test_imports_have_no_cycle() -> None:
    graph = {
        module: set(imports(path)) & set(MODULES) - {module} for module, path in MODULES.items()
    }
    assert find_cycle(graph) == ""


@pytest.mark.parametrize("folder", ["benchmarks", "scripts"])
def test_scripts_import_each_other_without_a_cycle(folder: str) -> None:
    """These folders are no packages: a script imports its neighbour by the file's name."""
    scripts = {path.stem: path for path in (ROOT / folder).rglob("*.py")}
    graph = {
        name: {
            used.split(".")[-1]
            for used in modules_named(path)
            if used.split(".")[0] != "stronghold"
        }
        & set(scripts) - {name}
        for name, path in scripts.items()
    }
    assert any(graph.values())
    assert find_cycle(graph) == ""


def test_cuda_is_named_in_one_file() -> None:
    strangers = [
        f"{room_of(path)}:{line}: {name}"
        for path in SOURCES
        if room_of(path) != "device/cuda.py"
        for line, name in names_used(path)
        if name == "torch.cuda" or name.startswith("torch.cuda.")
    ]
    assert strangers == []


def test_threads_are_made_by_devices() -> None:
    strangers = [
        f"{room_of(path)}:{line}: {name}"
        for path in SOURCES
        # What says that this rank lives must not be a lane, which may wait for the others.
        if not room_of(path).startswith(("device/", "team/watch.py"))
        for line, name in names_used(path)
        if name.split(".")[-1] in THREAD_MAKERS
    ]
    assert strangers == []


def test_only_the_command_prints() -> None:
    strangers = [
        f"{room_of(path)}:{line}"
        for path in SOURCES
        if room_of(path) != "cli.py"
        for line, name in names_used(path)
        if name in ("print", "sys.stdout", "sys.stderr")
    ]
    assert strangers == []


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        "import torch.cuda\nfrom threading import Thread\ndef f():\n"
        "    from stronghold import engine\n    print(torch.cuda.Stream)\n"
    )
    names = {name for _, name in names_used(source)}
    assert {"torch.cuda", "threading.Thread", "print", "torch.cuda.Stream"} <= names
    assert [name.split(".")[0] for name in imports(source)] == ["stronghold"]
