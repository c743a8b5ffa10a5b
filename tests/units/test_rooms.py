"""The borders between the rooms, as the source shows them: imports, threads, CUDA, prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "stronghold"

# The rooms from the cellar up; a module belongs to the longest prefix that matches.
LEVELS = {
    "stronghold": 7,
    "stronghold.cli": 7,
    "stronghold.plugin": 7,
    "stronghold.run": 7,
    "stronghold.shim": 7,
    "stronghold.engine": 7,
    "stronghold.simulate": 6,
    "stronghold.refine": 6,
    "stronghold.checkpoint": 6,
    "stronghold.doctor": 6,
    "stronghold.forecast": 6,
    "stronghold.pretrained": 6,
    "stronghold.runtime": 5,
    "stronghold.team": 4,
    "stronghold.plan": 4,
    "stronghold.plan.machine": 0,
    "stronghold.memory": 3,
    "stronghold.model": 2,
    "stronghold.config": 1,
    "stronghold.cpu_adam": 1,
    "stronghold.device": 1,
    "stronghold.states": 0,
    "stronghold.native": 0,
    "stronghold.errors": 0,
    "stronghold.limits": 0,
    "stronghold.process": 0,
    "stronghold.telemetry": 0,
}
THREAD_MAKERS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def level(module: str) -> int:
    """The level of a module's room; KeyError for one that has no room yet."""
    if module == "stronghold":
        return LEVELS[module]
    room = ".".join(module.split(".")[:2])
    return LEVELS[module] if module in LEVELS else LEVELS[room]


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


def test_every_module_has_a_room() -> None:
    homeless = [module for module in MODULES if not _has_level(module)]
    assert homeless == [], f"name their level in LEVELS, and in the design: {homeless}"


def _has_level(module: str) -> bool:
    try:
        level(module)
    except KeyError:
        return False
    return True


def test_imports_never_go_up() -> None:
    upward = [
        (module, level(module), name)
        for module, path in MODULES.items()
        for name in imports(path)
        if level(name) > level(module)
    ]
    assert upward == []


def test_imports_have_no_cycle() -> None:
    graph = {
        module: set(imports(path)) & set(MODULES) - {module} for module, path in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


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
