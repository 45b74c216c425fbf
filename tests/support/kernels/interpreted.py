"""Scripts that run kernels in Triton's interpreter, which is chosen when triton is imported.

Each runs in a process of its own, which forks from one that has imported torch and triton for two seconds of CPU time:
``python -m support.kernels.interpreted`` reads lines of JSON, a script and files for what it writes, and prints the
script's exit code, one after the other, until its input ends.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

SCRIPTS = Path(__file__).resolve().parents[2] / "kernels"


def interpreted(name: str) -> str:
    """What ``tests/kernels/interpret_NAME.py`` prints. It must end with exit code 0."""
    script = SCRIPTS / f"interpret_{name}.py"
    with TemporaryDirectory() as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        forking = _forking()
        assert forking.stdin is not None
        assert forking.stdout is not None
        print(json.dumps([str(script), str(output), str(errors)]), file=forking.stdin, flush=True)
        code = forking.stdout.readline().strip()
        assert code == "0", (code, errors.exists() and errors.read_text())
        return output.read_text()


@cache
def _forking() -> subprocess.Popen[str]:
    """The process that all of a session's fork from."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.kernels.interpreted"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def _serve() -> None:
    import triton.runtime.interpreter  # noqa: F401 - for the processes that fork

    import gemray_kernels.table  # noqa: F401 - the same

    for line in sys.stdin:
        script, *files = json.loads(line)
        if (child := os.fork()) == 0:
            _run(script, files)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(script: str, files: list[str]) -> NoReturn:
    """The forked process: what a new interpreter would do with the script, whose output and errors go to `files`."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
