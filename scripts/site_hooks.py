"""mkdocs hooks: pages link to files of the repository, which the site has beside its own pages.

Results of benchmarks become pages under `benchmarks/`. Other files (examples, kernels, numbers) are
copied under `files/`. Links in the pages follow.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\]\(((?:\.\./)[^)#\s]+)((?:#[^)]*)?)\)")


def outside_links(text: str, page: str) -> set[str]:
    """Paths in the repository, outside docs/, to which a page links. `page`: its path in docs/."""
    targets = {_target(link, page) for link, _ in OUTSIDE.findall(text)}
    return {target for target in targets if not target.startswith("docs/")}


def _target(link: str, page: str) -> str:
    """The path in the repository to which a page's link leads."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))


def place(target: str) -> str:
    """Where the site has a file of the repository."""
    results = "benchmarks/results/"
    if target.startswith(results) and target.endswith(".md"):
        return f"benchmarks/{target.removeprefix(results)}"
    if (ROOT / target).is_dir():
        return f"files/{target.rstrip('/')}.txt"
    return f"files/{target}"


def on_files(files: Files, config: Any) -> Files:
    """Add every file of the repository to which a page links."""
    targets: set[str] = set()
    folder = Path(config["docs_dir"])
    for page in folder.rglob("*.md"):
        name = page.relative_to(folder).as_posix()
        targets |= outside_links(page.read_text(encoding="utf-8"), name)
    for target in sorted(targets):
        path = ROOT / target
        if path.is_dir():
            names = sorted(
                entry.name for entry in path.iterdir() if not entry.name.startswith("__")
            )
            files.append(File.generated(config, place(target), content="\n".join(names) + "\n"))
        else:
            files.append(File.generated(config, place(target), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Point links outside docs/ to the site's copy."""
    if page.file.src_uri.startswith("benchmarks/"):
        return re.sub(r"\]\((?!https?:)[^)]*\)", "]", markdown) if "](" in markdown else markdown
    name = page.file.src_uri

    def inside(match: re.Match[str]) -> str:
        target = _target(match.group(1), name)
        if target.startswith("docs/"):
            return match.group(0)
        placed = posixpath.relpath(place(target), posixpath.dirname(name) or ".")
        return f"]({placed}{match.group(2)})"

    return OUTSIDE.sub(inside, markdown)
