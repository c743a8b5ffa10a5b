"""Sources of the project whose tests run: a folder, a packed distribution, or the package index."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path


class SourcesError(Exception):
    """There are no such sources. The message says what to give."""


def find_sources(
    given: Path | None, *, distribution: str | None, version: str, marker: Path, scratch: Path
) -> Path:
    """Return the folder that holds `marker`.

    given         a folder, or a source distribution (.tar.gz); None: pip downloads it
    distribution  name on the package index; None: the project's distribution has no tests
    marker        path of a file or folder that is in the sources
    scratch       an empty folder for what is unpacked

    Raises SourcesError if there is no such folder.
    """
    if given is None:
        if distribution is None:
            raise SourcesError(f"give a checkout of the project: a folder that holds {marker}")
        given = _download(f"{distribution}=={version}", scratch)
    if given.is_file():
        with tarfile.open(given) as packed:
            packed.extractall(scratch, filter="data")
        (given,) = (path for path in scratch.iterdir() if path.is_dir())
    if not (given / marker).exists():
        raise SourcesError(f"{given} has no {marker}: give a checkout or a source distribution")
    return given.resolve()


def _download(requirement: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", ":all:", "--no-build-isolation", requirement]
    done = subprocess.run([*command, "--dest", str(scratch)], check=False)
    if done.returncode:
        raise SourcesError(f"pip cannot download {requirement}: give a checkout of the project")
    (packed,) = scratch.glob("*.tar.gz")
    return packed
