"""Processes that end with their parent."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from engines.parent import die_with

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), die_with, (os.getpid(),))
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600).result()
"""
GONE_S = 20.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_of_a_pool_ends_with_whoever_made_the_pool(tmp_path, number):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
    give_up_s = time.monotonic() + GONE_S
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
