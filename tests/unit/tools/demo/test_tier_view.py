"""Sample memory tiers on a thread that ends whatever happens."""

from __future__ import annotations

import threading

import pandas as pd
import pytest

from dask_gpurt.tools.demo.tier_view import TierSampler
from tests.helpers.waiting import LIMIT_S


def test_ctrl_c_as_the_thread_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Python waits for it at the exit, for ever."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), TierSampler(pd.DataFrame).watching("a join"):
        pass
    (thread,) = started
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert thread.daemon
