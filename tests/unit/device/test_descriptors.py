"""Say at once that a process has few file descriptors left."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, resource
from dask_gpurt.device.host import FEW_LEFT, few_left
from dask_gpurt.device.host import HostDevice, HostPool
from dask_gpurt.device.pool import MappingError

assert few_left() is None
pool, device = HostPool(2**20), HostDevice(2**30)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
held = []
while len(os.listdir("/proc/self/fd")) <= 100 - 6:
    held.append(os.open("/dev/null", os.O_RDONLY))
print(few_left())
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print(few_left())
try:
    device.map(pool.ticket())
except MappingError as error:
    print(error)
"""


def test_it_is_said_with_what_would_be_right_while_few_are_left_and_when_none_is() -> None:
    """In a process of its own, whose limit is lowered."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    few, none, unmapped = done.stdout.splitlines()
    assert "of 100 file descriptors of this worker are in use" in few
    assert "100 of 100 file descriptors" in none
    assert "Too many open files" in unmapped
    assert all("raise the limit (ulimit -n)" in line for line in (few, none, unmapped))
