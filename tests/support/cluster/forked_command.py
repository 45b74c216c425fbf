"""`gemray` commands in processes that fork from one which has imported torch and transformers.

A command that serves, checks or measures imports for four seconds of CPU time, one that asks a server for half a
second. This is such a command but for them: arguments, environment, standard streams, signals, session and exit code
are its own, and Ray and gRPC are imported by the process itself, whose environment they read. Tests of a command's
start itself run `command.GEMRAY`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from support.processes.forking import forking

_Streams = tuple[Connection | None, Connection | None]
"""What standard output and standard error are; None is /dev/null."""


class ForkedCommand:
    """As much of an `asyncio.subprocess.Process` as the tests need. Use `start`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._note_end)

    @classmethod
    async def start(
        cls,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        start_new_session: bool = False,
        stdin: bytes | None = None,
    ) -> ForkedCommand:
        """Start ``gemray`` with `arguments`.

        Args:
            arguments: without the name of the program.
            environment: all of it; None for this process's.
            log: what standard error is appended to, in place of a pipe.
            start_new_session: whether it leads a session of its own.
            stdin: what it reads from a pipe; None for /dev/null.
        """
        context = forking()
        output, its_output = context.Pipe(duplex=False)
        errors, its_errors = context.Pipe(duplex=False)
        if log is not None:
            errors.close()
            its_errors.close()
            its_errors = Connection(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), readable=False)
        process = context.Process(
            target=_run,
            args=(arguments, dict(os.environ if environment is None else environment), os.getcwd(), stdin,
                  (its_output, its_errors), start_new_session),
        )  # fmt: skip
        process.start()
        its_output.close()
        its_errors.close()
        command = cls(process)
        command.stdout = await _reader(output)
        command.stderr = await _reader(errors) if log is None else None
        return command

    @property
    def returncode(self) -> int | None:
        """As of a subprocess: minus the signal that killed it."""
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal. Nothing if it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """The exit code, once it has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        """What it writes to its end."""
        assert self.stdout is not None
        assert self.stderr is not None
        out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, err

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set()


async def _reader(connection: Connection) -> asyncio.StreamReader:
    """A stream of what a pipe's other end writes."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(os.dup(connection.fileno()), "rb", buffering=0)
    connection.close()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def _take_stdin(content: bytes | None) -> None:
    """Make standard input what reads `content` to its end."""
    if content is None:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.close(reading)

    def write() -> None:
        with suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            pipe.write(content)

    threading.Thread(target=write, daemon=True).start()


def _run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    stdin: bytes | None,
    streams: _Streams,
    own_session: bool,
) -> NoReturn:
    """The process: what a new interpreter would do, and what one does at its end."""
    if own_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _take_stdin(stdin)
    for number, stream in enumerate(streams, start=1):
        if stream is not None:
            os.dup2(stream.fileno(), number)
            stream.close()
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, closefd=False),
        os.fdopen(1, "w", closefd=False),
        os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False),
    )
    sys.argv = ["gemray", *arguments]
    code: Any = 0
    try:
        from gemray_cluster.cli import main

        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    vars(threading)["_shutdown"]()  # threads that are no daemons
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
