"""Describe expressions from the catalogue, in place of Dask's computation of metadata.

Dask calls the library for the metadata of each expression: some 250 for a query, on a GPU a handful of
kernels each. Here the schema of an expression follows from those of its inputs, and only where it does not,
Dask is asked. Most expressions are asked for their columns alone, and never get a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from dask_gpurt.client.planning.catalogue.asking import QUESTION, Keep, Library, Remember, StandIn
from dask_gpurt.client.planning.catalogue.schema import SCHEMA, Schema, frame_of, known_schema, schema_of
from dask_gpurt.client.planning.catalogue.shapes import other_rule_of, rule_of, same
from dask_gpurt.dask_hooks import planning
from dask_gpurt.dask_hooks.planning import Expr
from dask_gpurt.observe import Metrics

#: A function of Dask that is replaced.
Original = Callable[[Any], Any]


def names_index(original: Callable[..., Any], frame: Any, columns: Any) -> Any:
    """Return whether columns name the index of a frame; Dask would make an expression of it to find out."""
    schema = known_schema(frame) if isinstance(frame, Expr) else None
    if schema is not None and list(schema.index.value.names) == [None]:
        return False
    return original(frame, columns)


class Describer:
    """Describe expressions while the runtime plans.

    ``keep``: keeps the answers of the library.
    ``remember``: keeps what follows from them, in this process alone.
    ``is_on``: returns whether the runtime plans for this thread.
    ``library``: asks the library.
    ``metrics``: counts descriptions.
    """

    def __init__(self, keep: Keep, remember: Remember, is_on: Callable[[], bool], metrics: Metrics):
        self.library, self._is_on, self._metrics = Library(keep, remember), is_on, metrics

    def describe_early(self, expr: Expr) -> None:
        """Set the metadata of an operation of another package, of whose classes Dask's are not the base."""
        kind: Any = type(expr)
        if (
            (rule := other_rule_of(kind)) is None
            or rule is same
            or any(type(each) is StandIn for each in expr.dependencies())
        ):
            return
        if (schema := self._known(expr)) is not None:
            planning.set_metadata(expr, frame_of(schema))

    def metadata(self, original: Original, expr: Expr) -> Any:
        """Return the metadata of an expression."""
        schema = self._known(expr)
        if schema is None:
            return original(expr)
        return frame_of(schema)

    def columns(self, original: Original, expr: Expr) -> Any:
        """Return the labels of its columns."""
        schema = self._known(expr)
        return original(expr) if schema is None else list(schema.labels)

    def dimensions(self, original: Original, expr: Expr) -> Any:
        """Return the number of its dimensions."""
        if planning.is_frame_of_chunks(expr):
            return 2
        schema = self._known(expr)
        return original(expr) if schema is None else 1 + schema.is_frame

    def kind_of(self, expr: Expr) -> Hashable | None:
        """Return what tells the class of the metadata of an expression; None if its schema is not known."""
        schema = self._known(expr)
        return None if schema is None else (schema.frames, schema.is_frame)

    def _known(self, expr: Expr) -> Schema | None:
        """Return the schema that an expression has, or that follows from those of its inputs."""
        found: Schema | None = vars(expr).get(SCHEMA)
        if found is not None or QUESTION in vars(expr) or "_meta" in vars(expr):
            return found
        kind: Any = type(expr)
        rule = rule_of(kind)
        if rule is None or planning.reads_more_than_operands(expr) or not self._is_on():
            return None
        found = rule(expr, self._schema, self.library)
        if found is not None:
            vars(expr)[SCHEMA] = found
        self._metrics.add("planning.metadata.{outcome}", 1, "left" if found is None else "derived")
        return found

    def _schema(self, expr: Expr) -> Schema | None:
        """Return the schema of an input; Dask describes it if nothing else does."""
        if (found := self._known(expr)) is not None:
            return found
        frame = planning.metadata(expr)
        for each in expr.dependencies():  # many operations have the metadata of their input
            if vars(each).get("_meta") is frame and (found := vars(each).get(SCHEMA)) is not None:
                break
        else:
            found = vars(expr).get(SCHEMA) or schema_of(frame)
        if found is not None:
            vars(expr)[SCHEMA] = found
        return found
