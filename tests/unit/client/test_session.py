"""Keep what the runtime knows of a client as long as the client, and refuse addresses without a scheduler."""

from __future__ import annotations

import asyncio
import gc
import socket
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from dask.backends import detect_entrypoints
from distributed import default_client
from distributed.security import Security

import dask_gpurt
from dask_gpurt import config
from dask_gpurt.client import addresses, following, session
from dask_gpurt.client.planning.keys import environment
from dask_gpurt.client.session import ClientSession, Sessions
from dask_gpurt.dask_hooks import lighter_tasks, parquet_files
from dask_gpurt.observe import MethodChoice


class FakeClient:
    """Record what is sent to the scheduler, by the loop that the test runs."""

    def __init__(self) -> None:
        self.id = "client"
        self.sent: list[str] = []
        self.callbacks: list[Callable[[], Any]] = []
        self.loop = SimpleNamespace(add_callback=self.callbacks.append)
        self.scheduler = SimpleNamespace(log_event=self.log_event)

    async def log_event(self, *, topic: str, msg: str) -> None:
        self.sent.append(msg)

    def run(self) -> None:
        for callback in self.callbacks:
            asyncio.run(callback())
        self.callbacks.clear()


def session_of(client: Any) -> ClientSession:
    return ClientSession(client, config.load().planning, Sessions())


def test_each_choice_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_REPORTED_CHOICES", 2)
    client = FakeClient()
    of_client = session_of(client)
    for name in ("a", "a", "b", "a"):
        of_client.report_choice(name, MethodChoice.DEFAULT)
    client.run()
    assert client.sent == ["DEFAULT", "DEFAULT"]
    for name in ("c", "a"):  # more than are remembered: forgotten, so "a" counts again
        of_client.report_choice(name, MethodChoice.NAMED)
    client.run()
    assert client.sent[2:] == ["NAMED", "NAMED"]


def test_a_session_does_not_keep_its_client() -> None:
    client = FakeClient()
    of_client, gone = session_of(client), weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    of_client.report_choice("a", MethodChoice.DEFAULT)  # nobody to send it to
    assert of_client.partition_sizes().workers == 0


def test_without_a_client_the_runtime_is_off_for_what_is_planned() -> None:
    sessions = Sessions()
    assert sessions.current() is None
    assert not sessions.is_on()
    assert sessions.planner() is None


def test_enable_without_a_client_names_the_address_of_a_scheduler() -> None:
    with pytest.raises(ValueError, match=r"dask_gpurt\.enable\('tcp://"):
        dask_gpurt.enable()


def test_a_first_query_finds_its_sources_hashed_and_no_garbage_due() -> None:
    hashed = (environment, lighter_tasks.compare, parquet_files.uses_the_name_only)
    for each in (*hashed, following.prepare, detect_entrypoints):
        each.cache_clear()
    survivors = [[each] for each in range(50_000)]
    gc.collect(1)
    with dask.config.set({"dataframe.backend": "cudf"}):
        following.prepare()
    assert [each.cache_info().currsize for each in (*hashed, detect_entrypoints)] == [1] * 4
    assert gc.isenabled()
    assert gc.get_count()[2] == 0, "a full collection is due"
    del survivors


# ---- addresses without a scheduler are refused in seconds -----------------------------------------


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(addresses, "TIMEOUT_S", 0.3)
    yield
    with pytest.raises(ValueError, match="No clients found"):
        default_client()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("inproc://1.2/3", "only from within the scheduler's own process"),
        ("localhost", "localhost is not the address of a scheduler: use tcp://HOST:PORT"),
        ("tcp://10.0.0.1", "use tcp://HOST:PORT"),
        ("tcp://10.0.0.1:port", "use tcp://HOST:PORT"),
        ("http://127.0.0.1:8787/status", "use tcp://HOST:PORT"),
    ],
)
def test_an_address_of_no_scheduler_is_refused_at_once(address: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dask_gpurt.enable(address)


def test_a_refused_connection_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"at tcp://127.0.0.1:{port}: connection refused") as refused:
        dask_gpurt.enable(f"tcp://127.0.0.1:{port}")
    assert len(traceback.format_exception(refused.value)) < 12, "the message stands below other errors"


def test_an_unknown_host_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*arguments: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("distributed.comm.tcp._DefaultLoopResolver.resolve", resolve)
    with pytest.raises(ConnectionError, match="no scheduler answers at tcp://nowhere:8786: unknown host"):
        dask_gpurt.enable("tcp://nowhere:8786")


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=r"no answer within 0\.3 s"):
            dask_gpurt.enable(address)


def test_credentials_come_from_where_a_client_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import dask

    given = []

    def load(info: dict[str, str]) -> Security:
        given.append(info)
        return Security(require_encryption=True)

    monkeypatch.setattr(addresses, "import_term", {"secrets.load": load}.__getitem__)
    with (
        dask.config.set({"distributed.client.security-loader": "secrets.load"}),
        pytest.raises(ConnectionError, match="encryption required"),
    ):
        addresses.require_scheduler("tcp://127.0.0.1:9")
    assert given == [{"address": "tcp://127.0.0.1:9"}]
