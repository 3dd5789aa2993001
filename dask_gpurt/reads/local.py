"""Tell one version of a file of this host from another, by what the operating system says of it.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

#: The device and the inode of a file, its size, and the times of its modification and change.
Version = tuple[int, int, int, int, int]
#: The least age of the last change of a file that is kept. One that is written again within a tick of the
#: kernel's clock, at most 10 ms, may look the same.
LEAST_AGE_NS = 1_000_000_000
#: What the kernel knows of the mounted file systems.
MOUNTS = "/proc/self/mountinfo"


def versions_of(paths: Iterable[str]) -> tuple[Version, ...]:
    """Return the versions of files. No program can set the time of the last change.

    Raises OSError if there is no such file.
    """
    return tuple(map(_version_of, paths))


def _version_of(path: str) -> Version:
    # Opened, since a network file system looks at the server again for that, but not for a stat.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
    finally:
        os.close(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def are_lasting(versions: Iterable[Version]) -> bool:
    """Return whether files whose versions were found just now would look different after any change.

    File systems of user space (FUSE) may make inodes and times up.
    """
    latest = time.time_ns() - LEAST_AGE_NS
    try:
        made_up = _devices_of_user_space()
    except OSError:  # not Linux, or a sandbox
        return False
    return all(
        max(mtime, ctime) < latest and device not in made_up for device, _, _, mtime, ctime in versions
    )


def _devices_of_user_space() -> set[int]:
    with open(MOUNTS) as mounts:
        fields = [line.split() for line in mounts]
    found = (each[2] for each in fields if each[each.index("-") + 1].startswith("fuse"))
    return {os.makedev(*map(int, device.split(":"))) for device in found}
