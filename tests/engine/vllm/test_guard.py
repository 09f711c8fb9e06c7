"""What a worker has started ends with it, also when it was killed."""

import subprocess
import sys

import psutil

from tests.service import assert_gone

WORKER = """
import subprocess, sys, time
from engine.vllm.guard import start_guard
guard = start_guard()
command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(guard.pid, child.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_workers_processes_end_with_it() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(word) for word in worker.stdout.readline().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert_gone(pids)
