"""The systems that are compared, each a server that is started, awaited, and ended with all its processes."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError, UnavailableError

NAME = "m"  # of the served model
POLL_S = 0.5
STOP_S = 30.0  # from the signal until what is left is killed
VLLM = "vllm serve {model}"


@dataclass(frozen=True, slots=True)
class System:
    """`prefill` 0: all workers do both. `max_batch_tokens` None: the system's own default."""

    name: str
    prefill: int
    decode: int
    max_batch_tokens: int | None
    is_vllm: bool

    def command(self, model: str, port: int, logs: Path, vllm: str, config: Path | None) -> list[str]:
        """`vllm`: how vLLM is started, with {model} for the model. `config`: serving.yaml for Baton."""
        if self.is_vllm:
            command = [*shlex.split(vllm.format(model=model)), "--served-model-name", NAME, "--port", str(port)]
            command += ["--data-parallel-size", str(self.decode)]
            tokens = self.max_batch_tokens
            return command if tokens is None else [*command, "--max-num-batched-tokens", str(tokens)]
        command = [sys.executable, "-m", "baton", "up", "--model", model, "--http-port", str(port)]
        command += ["--prefill", str(self.prefill), "--decode", str(self.decode), "--log-dir", str(logs)]
        keys = {"served_model_name": NAME, "router.grpc_port": 0, "workers.ready_timeout_s": 300}
        if self.max_batch_tokens is not None:
            keys["engine.max_batch_tokens"] = self.max_batch_tokens
        command += [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        return command if config is None else [*command, "--config", str(config)]


def parse_system(text: str, gpus: int) -> System:
    """`vllm`, `mixed`, `split` or `3P+1D`; `:2048` behind it: tokens of a step. Raises ConfigError."""
    kind, _, tokens = text.partition(":")
    counts = re.fullmatch(r"(\d+)P\+(\d+)D", kind)
    if counts:
        prefill, decode = int(counts[1]), int(counts[2])
    else:
        prefill, decode = {"vllm": (0, gpus), "mixed": (0, gpus), "split": (gpus // 2, gpus - gpus // 2)}.get(
            kind, (0, 0)
        )
    if not decode or (tokens and not tokens.isdecimal()) or (kind == "split" and gpus < 2):
        problem = f"{text!r} is none of vllm, mixed, split (of 2 GPUs or more) and 3P+1D, with :TOKENS behind it or not"
        raise ConfigError("--systems", problem)
    return System(text, prefill, decode, int(tokens) if tokens else None, kind == "vllm")


def has_vllm(vllm: str) -> bool:
    return shutil.which(shlex.split(vllm)[0]) is not None


@contextmanager
def running(command: Sequence[str], port: int, log: Path, ready_s: float) -> Iterator[float]:
    """Yields the seconds that the server took until it was ready. At the end no process of it is left, and its port is
    free. Raises UnavailableError when it is not ready in `ready_s`, with the end of its log."""
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while not _answers(port):
            if process.poll() is not None or time.monotonic() - began_s > ready_s:
                state = "is not ready" if process.returncode is None else f"ended with {process.returncode}"
                said = log.read_text(errors="replace")[-2000:]
                raise UnavailableError(f"{command[0]} {state} after {time.monotonic() - began_s:.0f} s; {log}: {said}")
            time.sleep(POLL_S)
        yield time.monotonic() - began_s
    finally:
        _stop(process)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise UnavailableError(f"port {port} is still taken after {command[0]} ended: {error}") from error


def _answers(port: int) -> bool:
    """Whether Baton says that it is ready; vLLM has no /ready, and serves from the first /health on."""
    for page in ("ready", "health"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except OSError:
            return False
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, and kills what is left of it: workers have sessions of their own."""
    family = _family(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        family |= _family(process.pid)
    deadline_s = time.monotonic() + STOP_S
    while left := {pid: begun for pid, begun in family.items() if _begun(pid) == begun}:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.poll()
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"processes {sorted(left)} of the server do not end")
        time.sleep(0.1)


def _family(pid: int) -> dict[int, str]:
    """The process and all below it, each with the time of its begin, because numbers are used again."""
    below: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            below.setdefault(int(fields[1]), []).append(int(folder.name))
    family, found = {}, [pid]
    while found:
        one = found.pop()
        family[one] = _begun(one)
        found += below.get(one, [])
    return {one: begun for one, begun in family.items() if begun}


def _begun(pid: int) -> str:
    """Empty where no such process lives."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
