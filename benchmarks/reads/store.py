"""Serve a folder as a bucket of an object store, at a given rate for each connection and with a latency.

Listing, ``HEAD`` and ``GET`` of S3, without signatures. The entity tag of an object is made of its inode, its
size and the times of its last modification and change.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

#: Bytes that are sent between two looks at the clock.
STEP = 1 << 20


class Store(BaseHTTPRequestHandler):
    """Answer requests for a bucket."""

    protocol_version = "HTTP/1.1"
    folder: Path
    rate: float
    latency: float
    total: float
    #: When all bytes that were sent at the total rate would be through.
    through: list[float]
    lock: threading.Lock
    #: What has been asked for so far; the path ``/requests`` tells it.
    requests: Iterator[int]

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        """Tell of an object."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send a listing, or an object or a range of it."""
        number = next(self.requests)
        if self.path == "/requests":
            self._send(200, str(number).encode())
            return
        time.sleep(self.latency)
        url = urlsplit(self.path)
        query = {name: value for name, (value, *_) in parse_qs(url.query, True).items()}
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        if not key:
            self._send(200, self._listing(**{name.replace("-", "_"): v for name, v in query.items()}))
        elif not (file := self.folder / key).is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._object(file)

    def _listing(self, prefix: str = "", delimiter: str = "", **_: str) -> bytes:
        keys = sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())
        keys = [key for key in keys if key.startswith(prefix)]
        deeper = {
            key[: key.index(delimiter, len(prefix)) + 1]
            for key in keys
            if delimiter and delimiter in key[len(prefix) :]
        }
        objects = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_tag(self.folder / key))}</ETag><Size>{(self.folder / key).stat().st_size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in keys
            if not any(map(key.startswith, deeper))
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(deeper)
        )
        found = f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        found += f"<KeyCount>{len(keys)}</KeyCount>{objects}{common}"
        return f"<ListBucketResult>{found}</ListBucketResult>".encode()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _object(self, path: Path) -> None:
        with path.open("rb") as file:
            tag, size = _tag(path), os.fstat(file.fileno()).st_size
            start, stop, status = 0, size, 200
            if (match := self.headers.get("If-Match")) and match not in (tag, "*"):
                self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            if asked := self.headers.get("Range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start = int(first) if first else max(0, size - int(last))
                stop = min(size, int(last) + 1) if first and last else size
                status = 206
            self.send_response(status)
            for name, value in {
                "ETag": tag,
                "Content-Length": str(stop - start),
                "Content-Type": "application/octet-stream",
                "Accept-Ranges": "bytes",
                "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                **({"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if status == 206 else {}),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.flush()
            if self.command != "HEAD":
                self._copy(file.fileno(), start, stop)

    def _copy(self, file: int, start: int, stop: int) -> None:
        began, at = time.perf_counter(), start
        while at < stop:
            sent = os.sendfile(self.connection.fileno(), file, at, min(STEP, stop - at))
            at += sent
            now = time.perf_counter()
            with self.lock:
                self.through[0] = max(now, self.through[0]) + sent / self.total
                due = self.through[0]
            if (ahead := max(began + (at - start) / self.rate, due) - now) > 0:
                time.sleep(ahead)


def _tag(path: Path) -> str:
    status = path.stat()
    return f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ctime_ns:x}"'


def serve(
    folder: Path,
    rate: float = 1e12,
    latency: float = 0.0,
    port: int = 0,
    address: str = "127.0.0.1",
    total: float = 1e12,
) -> ThreadingHTTPServer:
    """Return a server of a folder, yet to be started.

    Parameters
    ----------
    rate
        Bytes per second for each connection.
    latency
        Seconds before the first byte of an answer.
    total
        Bytes per second for all connections together.
    """
    given = {"folder": folder, "rate": rate, "latency": latency, "total": total}
    handler = type(
        "Served", (Store,), {**given, "requests": count(), "through": [0.0], "lock": threading.Lock()}
    )
    return ThreadingHTTPServer((address, port), handler)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--rate", type=float, default=200e6)
    options.add_argument("--latency", type=float, default=0.02)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--address", default="127.0.0.1")
    options.add_argument("--total", type=float, default=1e12)
    server = serve(**vars(options.parse_args()))
    print(server.server_port, flush=True)
    server.serve_forever()
