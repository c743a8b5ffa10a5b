"""Processes of a Python that has imported torch, DeepSpeed and the engine already, which takes
seconds: a server imports them once for all processes of a test run, and forks. A child ends as
every program does, by the interpreter's own end. What an import reads of the environment, it has
read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
# lines of other packages on the screen: DeepSpeed's, torch's, torchao's
FOREIGN = re.compile(r"WARNING|Warning:|Failed to load|^W\d{4} ", re.MULTILINE)
LONGEST = 1 << 17  # bytes of a request
SERVER = """
import socket, sys
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    listening.bind("\\0" + sys.argv[1])
except OSError:
    sys.exit()  # another process's server has the name
import deepspeed, stronghold.engine, torch._dynamo, tests.models, tests.support.rank_programs
from tests.support.children import serve
sys.argv = serve(listening)
exec(compile(sys.argv.pop(0), "-c", "exec"), {"__name__": "__main__"})
"""


class Child:
    """A process that runs `code` with `arguments`; as `subprocess.Popen` where it has its names."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        env: dict[str, str] | None = None,
        server: int = 0,
        stdin: int = 0,
        stdout: int | IO[Any] = 1,
        stderr: int | IO[Any] = 2,
    ) -> None:
        self.returncode: int | None = None
        self._line = _line(server)
        files = [f if isinstance(f, int) else f.fileno() for f in (stdin, stdout, stderr)]
        request = ([code, "-c", *map(str, arguments)], dict(os.environ) if env is None else env)
        socket.send_fds(self._line, [pickle.dumps(request)], files)
        self.pid: int = pickle.loads(self._line.recv(LONGEST))

    def poll(self) -> int | None:
        if self.returncode is None:
            self._line.sendall(pickle.dumps(self.pid))
            self.returncode = pickle.loads(self._line.recv(LONGEST))
        return self.returncode

    def wait(self, timeout: float = 240.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a child", timeout)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def run(code: str, *arguments: object, folder: Path, **options: Any) -> tuple[int, str]:
    """Its status, and what it wrote on stderr."""
    with (folder / "stderr").open("w+") as stderr:
        status = Child(code, *arguments, stderr=stderr, **options).wait()
    said = (folder / "stderr").read_text()
    (folder / "stderr").unlink()
    return status, said


@functools.cache
def _line(server: int) -> socket.socket:
    """To a server, of several with an order of sets of their own, as ranks have it. The processes
    of one test run share them: who finds none starts it."""
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = f"stronghold tests {session} {server}"
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    started = None
    while line.connect_ex(f"\0{name}"):
        if started is None:
            started = subprocess.Popen(
                [sys.executable, "-c", SERVER, name],
                cwd=ROOT,
                env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            )
        assert not started.poll(), "the server has failed"
        time.sleep(0.02)
    return line


def serve(listening: socket.socket) -> list[str]:
    """Serve each client in a fork, until all of them have gone. Returns in each child, with what it
    shall run."""
    listening.listen()
    listening.settimeout(1.0)
    left_s = 60.0  # until the first one
    while True:
        try:
            line, _ = listening.accept()
        except TimeoutError:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    left_s = 0.0
                continue
            left_s -= 1.0
            if left_s < 0.0:
                sys.exit()
        else:
            line.setblocking(True)
            if os.fork() == 0:
                listening.close()
                return _serve(line)
            line.close()


def _serve(line: socket.socket) -> list[str]:
    with line:
        while True:
            message, files, _, _ = socket.recv_fds(line, LONGEST, 3)
            if not message:
                sys.exit()
            request = pickle.loads(message)
            if isinstance(request, int):
                pid, status = os.waitpid(request, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            else:
                sys.stdout.flush()
                answer = os.fork()
                if answer == 0:
                    break
                for file in files:
                    os.close(file)
            line.sendall(pickle.dumps(answer))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    argv, environment = request
    os.environ.clear()
    os.environ.update(environment)
    return argv
