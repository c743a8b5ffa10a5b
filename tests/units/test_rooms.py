"""The borders between the rooms, as the source shows them: imports, threads, CUDA, prints, and
private names of other packages."""

from __future__ import annotations

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

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
    """`plan` of `stronghold.plan.rules`, `__init__` of the package itself."""
    return [*module.split("."), "__init__"][1]


def level(module: str) -> int:
    """The level of a module's room; KeyError for a room that the table does not have."""
    return LEVELS[room_of_module(module)]


@functools.cache
def imports(path: Path) -> set[str]:
    """The package's modules that a file imports, wherever in it and for whatever reason."""
    found: set[str] = set()
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
        found.update(name for name in names if name.split(".")[0] == "stronghold")
    return found


def dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


@functools.cache
def names_used(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every name, attribute and import in a file."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name | ast.Attribute):
            found.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


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
    graph = {module: imports(path) & set(MODULES) - {module} for module, path in MODULES.items()}
    assert find_cycle(graph) == ""


def test_rooms_import_each_other_without_a_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        room = room_of_module(module)
        used = {room_of_module(name) for name in imports(path)}
        graph.setdefault(room, set()).update(used - {room})
    assert find_cycle(graph) == ""


def test_cuda_is_named_in_two_files() -> None:
    strangers = [
        f"{room_of(path)}:{line}: {name}"
        for path in SOURCES
        if room_of(path) not in ("devices/cuda.py", "devices/host_memory.py")
        for line, name in names_used(path)
        if name == "torch.cuda" or name.startswith("torch.cuda.")
    ]
    assert strangers == []


def test_threads_are_made_by_devices() -> None:
    strangers = [
        f"{room_of(path)}:{line}: {name}"
        for path in SOURCES
        if not room_of(path).startswith("devices/")
        for line, name in names_used(path)
        if name.split(".")[-1] in THREAD_MAKERS
    ]
    assert strangers == []


def test_only_the_command_prints() -> None:
    strangers = [
        f"{room_of(path)}:{line}"
        for path in SOURCES
        if room_of(path) != "tools/cli.py"
        for line, name in names_used(path)
        if name in ("print", "sys.stdout", "sys.stderr")
    ]
    assert strangers == []
