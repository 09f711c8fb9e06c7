"""Libraries that stand in front of the C library of a process, compiled from the C files beside this one."""

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-Wno-unused-result")


def why_no_preload() -> str:
    if sys.platform != "linux":
        return "preloaded libraries are written for Linux"
    return "" if shutil.which("cc") else "preloaded libraries need a C compiler (cc)"


def compiled(name: str, folder: Path) -> Path:
    """NAME.c as a library in `folder`."""
    path = folder / f"{name}.so"
    if not path.exists():
        subprocess.run(["cc", *FLAGS, "-o", str(path), str(HERE / f"{name}.c"), "-ldl", "-lpthread"], check=True)
    return path
