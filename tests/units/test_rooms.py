"""The borders between the rooms, as the source shows them: imports, threads, CUDA, prints, and
private names: those of other packages, and those that tests read."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

from stronghold.streaming.patches.table import PATCHES, Patch

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


def test_rooms_import_each_other_without_a_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        room = room_of_module(module)
        used = {room_of_module(name) for name in imports(path)}
        graph.setdefault(room, set()).update(used - {room})
    assert find_cycle(graph) == ""


def test_few_rooms_on_few_levels() -> None:
    assert len(LEVELS) <= 24
    assert max(LEVELS.values()) + 1 <= 11


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
# take a name as a string
BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "object", "patch"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, names) of each place at which a file reads a private name off an object, imports one,
    or gives one to `setattr` and the like. A chain such as `torch._C._name` is one place. An object
    may read its own: what stands right behind `self` and `cls` does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names = chain_of(node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported = [*str(node.module).split("."), alias.name]
                if any(map(is_private, imported)):
                    yield node.lineno, ".".join(imported)
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in BY_NAME:
            words = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            names = [part for word in words for part in str(word).split(".")]
        first = next((k for k, name in enumerate(names) if is_private(name)), None)
        if first is not None:
            yield node.lineno, ".".join(names[first:])


def chain_of(node: ast.expr) -> list[str]:
    """The attributes of `a.b.c`, from left to right, without those of `self` and `cls` themselves;
    what stands before a call or an index is another chain."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    own = isinstance(node, ast.Name) and node.id in ("self", "cls")
    return names[1:] if own else names


# -- private names of other packages ---------------------------------------------------------------
PATCHES_ROOM = "streaming/patches/"
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
    """`docs/patches.md` lists them; rows name the lower rooms that cannot import `patches`."""
    ours, theirs = names_of_ours(), names_of_theirs()
    used = {
        (room_of(path), word)
        for path in SOURCES
        if not room_of(path).startswith(PATCHES_ROOM)
        for word in foreign_words(path, ours, theirs)
    }
    allowed = {
        (file, word) for patch in PATCHES for file in patch.beside for word in words_of(patch)
    }
    assert used - allowed == set(), "use or add a function of stronghold/streaming/patches"
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


def test_private_names_of_other_packages_are_seen_wherever_they_stand(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        "import torch._dynamo\nfrom a._b import c\nfrom stronghold.model import _mine\n"
        "class A:\n    def f(self, other):\n        self._parameters = other._parameters\n"
        "        self._of_the_base\ntorch._C._name(x)[0]._ours\n"
        'getattr(a, "_name_of_theirs")\nvars(a)["_other"]\nf"{a}_text"\nsys._current_frames()\n'
    )
    assert foreign_words(source, {"_mine", "_ours", "_parameters"}, names_of_theirs()) == {
        "_dynamo", "_b", "_parameters", "_of_the_base", "_C", "_name", "_name_of_theirs", "_other",
    }  # fmt: skip


# -- private names in tests ------------------------------------------------------------------------
# By file and name: in how many places, and why. Torch's, DeepSpeed's and others' names stand here
# where these have no public one. No new one of ours: tests look inside through engine.inspect().
PRIVATE_NAMES: dict[str, tuple[int, str]] = {
    # Names that frameworks and programs call.
    "border/test_user_backward.py _backward_epilogue": (1, "programs with several engines call it"),
    # Tests of kernels on a device.
    "gpu/test_kernels_cuda.py _sleep": (2, "nothing else holds a stream up"),
    "gpu/test_kernels_cuda.py _tables.clear": (1, "tables of launches begin anew"),
    "gpu/test_training_cuda.py _apply": (1, "metrics override it to move their states"),
    "support/device_kernels.py _base": (1, "a view's tensor has no public name"),
    "units/test_device_kernels.py triton._C.libtriton.interpreter": (1, "Triton's interpreter"),
    "units/test_device_kernels.py _groups": (2, "rows of one launch"),
    "units/test_device_kernels.py _tables": (2, "tables of launches are counted"),
    "units/test_device_programs.py _active": (2, "Triton's driver is put back"),
    # Torch.
    "border/test_compile.py _dynamo.utils.counters": (1, "frames that were compiled are counted"),
    "laws/test_attention.py _scaled_dot_product_flash_attention_for_cpu": (1, "the operator"),
    "laws/test_reads.py _parameters": (1, "a program may read it"),
    "laws/test_weights_read.py _C.DisableTorchFunctionSubclass": (1, "an extension reads so"),
    "laws/test_weights_written.py _foreach_mul_": (1, "optimizers write so"),
    "support/chunked.py _parameters": (1, "the plain loop gives a block other tensors"),
    "support/counted.py torch.utils._python_dispatch.TorchDispatchMode": (1, "its only name"),
    "support/insides.py _backward_hooks": (1, "torch shows no list of hooks"),
    "support/insides.py _post_accumulate_grad_hooks": (1, "torch shows no list of hooks"),
    "support/sleeping.py _sleep": (1, "nothing else holds a stream up"),
    # The pretended device stands for torch's own.
    "pretended/install.py _sleep": (1, "replaced"),
    "pretended/install.py _C._cuda_getCurrentRawStream": (1, "replaced"),
    "pretended/install.py _C._cuda_clearCublasWorkspaces": (1, "replaced"),
    "pretended/install.py _lazy_init": (1, "replaced"),
    "pretended/install.py _is_compiled": (1, "replaced"),
    # Others.
    "support/lightning_on_cpu.py _validate_device_index_selection": (1, "Lightning refuses a CPU"),
    "conftest.py _WORLD_GROUP": (2, "DeepSpeed keeps a group that is gone"),
    "support/frameworks.py _reset_state": (2, "Accelerate keeps its state in the process"),
    "units/test_operator_bytes.py _scaled_dot_product_flash_attention": (
        1,
        "the operator of torch that is counted",
    ),
}
MOST_PRIVATE_NAMES = 40


def test_tests_read_no_private_name_but_these() -> None:
    tests = ROOT / "tests"
    found = Counter(
        f"{path.relative_to(tests).as_posix()} {names}"
        for path in sorted(tests.rglob("*.py"))
        for _, names in private_names(path)
    )
    more = {
        place: number
        for place, number in found.items()
        if number > PRIVATE_NAMES.get(place, (0, ""))[0]
    }
    assert more == {}, "use a public name, or a field of engine.inspect()"
    assert found.total() <= MOST_PRIVATE_NAMES


def test_private_names_are_seen_wherever_they_stand(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        "import os, torch._dynamo\nfrom a.b import _c\n"
        "class A:\n    def f(self):\n        self._own = self._own._other\n"
        "made()._stack.runtime(x)[0]._y\nmonkeypatch.setattr(a, '_b', 1)\nsetattr(a, 'b._c', 1)\n"
        "os._exit(0)\nrow._replace(a=1)\na.__dict__\n"
    )
    assert sorted(names for _, names in private_names(source)) == sorted(
        ["_dynamo", "a.b._c", "_other", "_stack.runtime", "_y", "_b", "_c"]
    )


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        "import torch.cuda\nfrom threading import Thread\ndef f():\n"
        "    from stronghold import engine\n    print(torch.cuda.Stream)\n"
    )
    names = {name for _, name in names_used(source)}
    assert {"torch.cuda", "threading.Thread", "print", "torch.cuda.Stream"} <= names
    assert [name.split(".")[0] for name in imports(source)] == ["stronghold"]
