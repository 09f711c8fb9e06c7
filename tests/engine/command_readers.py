"""Processes that read a command channel, for its tests: as ranks do, but without a model.

    python command_readers.py MODE DESCRIPTOR...

Mode `echo` prints the length and hash of each command; `silent` takes nothing. An empty command ends either.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from engine.ranks.command_channel import CommandReader, CommandWriter, ReaderEnds
from runtime.errors import RankLostError

ROOT = Path(__file__).parents[2]


class ReaderProcess:
    """Implements `engine.ranks.command_channel.Peer`."""

    def __init__(self, ends: ReaderEnds, mode: str) -> None:
        command = [sys.executable, "-m", "tests.engine.command_readers", mode, *map(str, ends.all())]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            pass_fds=ends.all(),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"},
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        assert self.output.readline() == b"ready\n"

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def lost(self, problem: str | None = None) -> RankLostError:
        return RankLostError(1, self.process.pid, problem or f"ended with {self.process.wait(60)}")

    def heard(self, count: int) -> list[tuple[int, str]]:
        """Length and hash of the next commands."""
        lines = [self.output.readline().split() for _ in range(count)]
        return [(int(length), digest.decode()) for length, digest in lines]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()
        os.close(self.pidfd)


class Channel:
    """A writer and its readers, which end with the context."""

    def __init__(self, readers: int, unread_bytes: int = 1 << 16, mode: str = "echo") -> None:
        self.writer = CommandWriter(readers, unread_bytes)
        self.readers = [ReaderProcess(self.writer.ends(reader), mode) for reader in range(readers)]
        self.writer.attach(self.readers)

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self.readers:
            reader.end()
        self.writer.close()


def digest(payload: bytes | bytearray) -> str:
    return hashlib.blake2b(payload, digest_size=8).hexdigest()


def main() -> None:
    mode, *descriptors = sys.argv[1:]
    print("ready", flush=True)
    if mode == "silent":
        time.sleep(600)
    reader = CommandReader(ReaderEnds(*map(int, descriptors)))
    while True:
        payload = reader.receive()
        print(len(payload), digest(payload), flush=True)
        reader.done()


if __name__ == "__main__":
    main()
