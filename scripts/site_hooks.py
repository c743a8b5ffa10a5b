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


def outside_links(text: str) -> set[str]:
    """Paths in the repository, outside docs/, to which a page of docs/ links."""
    targets = {
        posixpath.normpath(posixpath.join("docs", link)) for link, _ in OUTSIDE.findall(text)
    }
    return {target for target in targets if not target.startswith("docs/")}


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
    for page in Path(config["docs_dir"]).glob("*.md"):
        targets |= outside_links(page.read_text(encoding="utf-8"))
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
    return OUTSIDE.sub(_inside, markdown)


def _inside(match: re.Match[str]) -> str:
    target = posixpath.normpath(posixpath.join("docs", match.group(1)))
    return f"]({place(target)}{match.group(2)})"
