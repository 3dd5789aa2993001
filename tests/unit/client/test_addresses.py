"""Refuse an address that has no scheduler, in seconds, and leave no client behind."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Iterator

import pytest
from distributed import default_client
from distributed.security import Security

import dask_gpurt
from dask_gpurt.client import addresses


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
