"""Runs `baton` in a terminal of its own, as a person would."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from types import TracebackType
from typing import Self

SILENCE_S = 60.0
# The command makes the terminal its own. subprocess could call that between fork and exec, but where tests use gRPC its
# threads live on in a fork, and there they write to the command's terminal.
IN_OWN_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
BATON = [sys.executable, "-S", "-c", IN_OWN_TERMINAL, "-m", "baton"]


class TerminalRun:
    """A command in a terminal of `columns`; Ctrl-C there interrupts it. The context kills a command that lives on."""

    def __init__(self, *arguments: str, columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*BATON, *arguments], env=environ | {"TERM": "dumb"}, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.seen = ""  # all that was shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def until(self, words: str, since: int = 0) -> int:
        """Reads until `words` are shown behind the first `since` characters. Returns where they end."""
        while words not in self.seen[since:]:
            assert self._read(), f"{words!r} was not shown, but {self.seen!r}"
        return self.seen.index(words, since) + len(words)

    def press_until(self, key: str, words: str, since: int) -> int:
        """As until(), and presses a key every second: Python's readline sees no Ctrl-C between its prompt and its
        waiting for keys before the next key."""
        while words not in self.seen[since:]:
            self.type(key)
            while words not in self.seen[since:] and select.select([self._ours], [], [], 1.0)[0]:
                assert self._read(), f"{words!r} was not shown, but {self.seen!r}"
        return self.until(words, since)

    def until_more(self, since: int) -> None:
        """Reads until more than the first `since` characters were shown."""
        while len(self.seen) <= since:
            assert self._read(), self.seen

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        """Reads to the end. Returns the exit code."""
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        assert select.select([self._ours], [], [], SILENCE_S)[0], f"nothing more was shown after {self.seen!r}"
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # as Linux says that nobody has the terminal any more
            return False
        self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
