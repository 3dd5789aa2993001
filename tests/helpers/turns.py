"""Let everything that waits go on only when the test says so: coroutines, and threads in turn with the loop.

A thread of a task runs while the event loop stands still, until it ends or waits: for a coroutine, or for a
condition. It then waits for its turn while the loop goes on. So the same turns give the same run each time.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar
from unittest import mock

from dask_gpurt.shuffle import run

T = TypeVar("T")
#: What a thread asks the event loop for: a coroutine to run, or to end with a result or an error.
_Step = tuple[Callable[[], Coroutine[Any, Any, Any]] | None, Any, BaseException | None]

_thread = threading.local()
_wait = threading.Condition.wait


class VirtualLoop(asyncio.SelectorEventLoop):
    """Run callbacks on an event loop whose time passes only when the test says so."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now

    def next_timer(self) -> float | None:
        """Return when the next timer ends; None if there is none."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return min((timer.when() for timer in timers if not timer.cancelled()), default=None)

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds

    def pass_until_next_timer(self) -> None:
        """Let time pass until the next timer ends."""
        if (ends := self.next_timer()) is not None:
            self._now = max(self._now, ends)

    def settle(self) -> None:
        """Run callbacks until all that is left waits for the test."""

        def look() -> None:
            if self._ready:  # type: ignore[attr-defined]
                self.call_soon(look)
            else:
                self.stop()

        self.call_soon(look)
        self.run_forever()


@dataclass(eq=False)
class Turn:
    """Hold something that waits: what it is, and the process that it belongs to."""

    what: str
    owner: Any
    go: asyncio.Future[None]

    def __repr__(self) -> str:
        return f"{self.what} on {getattr(self.owner, 'address', 'the scheduler')}"


@dataclass
class Turns:
    """List what waits, the oldest first."""

    loop: VirtualLoop
    waiting: list[Turn] = field(default_factory=list)
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine."""
        task = self.loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def wait(self, what: str, owner: Any) -> None:
        """Wait until the test gives this the next turn."""
        turn = Turn(what, owner, self.loop.create_future())
        self.waiting.append(turn)
        try:
            await turn.go
        finally:
            self.waiting.remove(turn)

    @staticmethod
    def give(turn: Turn) -> None:
        """Let something go on."""
        if not turn.go.done():
            turn.go.set_result(None)

    async def on_thread(self, what: str, owner: Any, function: Callable[[], T]) -> T:
        """Run a function on a thread of its own, in turn with the event loop."""
        steps: SimpleQueue[_Step] = SimpleQueue()
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def ask(function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
            steps.put((function, None, None))
            answer, error = answers.get()
            if error is not None:
                raise error
            return answer

        def body() -> None:
            _thread.ask = ask
            _thread.wait = lambda: ask(lambda: self.wait(what, owner))
            try:
                steps.put((None, function(), None))
            except BaseException as error:
                steps.put((None, None, error))

        threading.Thread(target=contextvars.copy_context().run, args=(body,)).start()
        while True:
            coroutine, result, error = steps.get()  # the loop stands still
            if coroutine is None:
                if error is not None:
                    raise error
                done: T = result
                return done
            try:
                answers.put((await coroutine(), None))
            except BaseException as raised:  # also a cancellation: the thread has to end with its process
                answers.put((None, raised))


def _sync(loop: Any, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **options: Any) -> Any:
    """Replace Dask's ``sync``, by which a task waits for a coroutine."""
    return _thread.ask(lambda: function(*args, **options))


def _wait_in_turn(self: Any, timeout: float | None = None) -> bool:
    """Replace ``Condition.wait``, on which futures and events are built too."""
    if not hasattr(_thread, "wait"):
        return _wait(self, timeout)
    saved = self._release_save()
    try:
        _thread.wait()
    finally:
        self._acquire_restore(saved)
    return False  # as after a timeout: callers look whether it has happened


@contextmanager
def threads_in_turn() -> Iterator[None]:
    """Make threads of `Turns.on_thread` wait for their turns."""
    with mock.patch.object(run, "sync", _sync), mock.patch.object(threading.Condition, "wait", _wait_in_turn):
        yield
