"""The borders between the rooms, as the source shows them: imports, threads, CUDA, prints, and
private names of other packages."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import torch

from stronghold.patches.table import PATCHES, Patch

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
        if room_of(path) not in ("devices/cuda.py", "devices/pinned.py")
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


# Private by an underscore, and documented for everybody.
DOCUMENTED = {"_exit", "_replace", "_fields", "_asdict", "_make", "_current_frames"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


# -- private names of other packages ---------------------------------------------------------------
PATCHES_ROOM = "patches/"
# Strings that look like private names and are none: the built kernels' folder, a prefix of names.
ONLY_TEXT = {"_native", "_forward_"}


def words_of(patch: Patch) -> set[str]:
    """The private words in the dotted names of a row."""
    return {word for name in patch.names for word in name.split(".") if is_private(word)}


def names_of_theirs() -> set[str]:
    """Private names that rows have, and those of torch's own objects, whatever ours are called."""
    objects = [torch.ones(1), torch.nn.Linear(1, 1), torch.ones(1).untyped_storage()]
    return {name for thing in objects for name in dir(thing) if is_private(name)}.union(
        *map(words_of, PATCHES)
    )


@functools.cache
def names_of_ours() -> set[str]:
    """Private names that the package gives to its functions, classes, attributes and variables."""
    names = set(ONLY_TEXT)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.update([node.attr] if dotted(node.value) in ("self", "cls") else [])
    return names


def private_words(path: Path) -> Iterator[tuple[str, bool]]:
    """Each private name in a file, and whether it is an attribute of `self` or `cls`: attributes,
    imports, and strings that are a name (`getattr(x, "_name")`, `vars(x)["_name"]`)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        words: list[str] = []
        if isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            words = [
                word for alias in node.names for word in f"{node.module}.{alias.name}".split(".")
            ]
        elif isinstance(node, ast.Import):
            words = [word for alias in node.names for word in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [node.value] if id(node) not in texts and node.value.isidentifier() else []
        is_own = isinstance(node, ast.Attribute) and dotted(node.value) in ("self", "cls")
        yield from ((word, is_own) for word in words if is_private(word))


def foreign_words(path: Path, ours: set[str], theirs: set[str]) -> set[str]:
    """The private names of other packages that a file uses."""
    return {
        word
        for word, is_own in private_words(path)
        if word not in ours or (word in theirs and not is_own)
    }


def test_private_names_of_other_packages_stand_in_patches_alone() -> None:
    """`docs/patches.md` lists them; rows name the other files that use them."""
    ours, theirs = names_of_ours(), names_of_theirs()
    used = {
        (room_of(path), word)
        for path in SOURCES
        if not room_of(path).startswith(PATCHES_ROOM)
        for word in foreign_words(path, ours, theirs)
    }
    allowed = {
        (file, word)
        for patch in PATCHES
        for file in (patch.file, *patch.beside)
        for word in words_of(patch)
    }
    assert used - allowed == set(), "use or add a function of stronghold/patches"
    unused = {
        (patch.key, file)
        for patch in PATCHES
        if words_of(patch)
        for file in patch.beside
        if not any((file, word) in used for word in words_of(patch))
    }
    assert unused == set(), "take the file out of the row in patches/table.py"


def test_patches_use_no_private_name_without_a_row() -> None:
    ours, theirs = names_of_ours(), names_of_theirs()
    in_rows = set().union(*map(words_of, PATCHES))
    used = {
        word
        for path in SOURCES
        if room_of(path).startswith(PATCHES_ROOM) and path.stem != "table"
        for word in foreign_words(path, ours, theirs)
    }
    assert used - in_rows == set()
    files = {room_of(path) for path in SOURCES}
    assert {file for patch in PATCHES for file in (patch.file, *patch.beside)} <= files
