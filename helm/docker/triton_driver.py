"""Compiles Triton's one C module when the image is built, so that the image needs no compiler.

Triton compiles its driver module, which loads and launches every kernel, where the first kernel runs; kernels take
`ptxas`, which is in its wheel. `cc` beside this file hands the module out in the compiler's place.

    python triton_driver.py DIRECTORY
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Write the module and the source that it was made of into the directory that is named."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import _build

    target = Path(sys.argv[1])
    source = Path(driver.dirname) / "driver.c"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_stub(source, Path(folder), driver.include_dirs)
        libraries = [driver.libdevice_dir, folder]
        built = _build("cuda_utils", str(source), folder, libraries, driver.include_dirs, driver.libraries, [])
        shutil.copy(built, target / "cuda_utils.so")
        load = "import importlib.util as u; s = u.spec_from_file_location('cuda_utils', r'{}'); u.module_from_spec(s)"
        environment = {**os.environ, "LD_LIBRARY_PATH": folder}
        subprocess.run([sys.executable, "-c", load.format(target / "cuda_utils.so")], env=environment, check=True)
    shutil.copy(source, target / "driver.c")


def make_stub(source: Path, folder: Path, include_dirs: list[str]) -> None:
    """Make a `libcuda.so.1` that has the functions which `source` calls: the real one comes with the host's driver."""
    import sysconfig

    includes = [f"-I{directory}" for directory in [*include_dirs, sysconfig.get_paths()["include"]]]
    compiled, stub = folder / "driver.o", folder / "stub.c"
    subprocess.run(["gcc", "-c", "-fPIC", "-Wno-psabi", *includes, "-o", compiled, source], check=True)
    listed = subprocess.run(["nm", "--undefined-only", compiled], check=True, capture_output=True, text=True).stdout
    functions = [line.split()[-1] for line in listed.splitlines() if line.split()[-1].startswith("cu")]
    stub.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    library = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, stub], check=True)


if __name__ == "__main__":
    main()
