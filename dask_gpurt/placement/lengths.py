"""How long tasks take, learned by prefix: with large inputs longer, as far as they have until now. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: The weight of the last task in what is known of its prefix, once there are as many.
WEIGHT = 0.05
#: Tasks of a prefix before anything is said of it, and how far sizes depart from their mean, as a part of it.
LEAST, SPREAD = 4, 0.2


@dataclass(slots=True)
class _Known:
    """Means of bytes and seconds, the variance of bytes, and the covariance of both."""

    number: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0

    def observe(self, nbytes: float, seconds: float) -> None:
        self.number += 1
        weight = max(1 / self.number, WEIGHT)
        more, longer = nbytes - self.nbytes, seconds - self.seconds
        self.nbytes += weight * more
        self.seconds += weight * longer
        self.variance = (1 - weight) * (self.variance + weight * more * more)
        self.covariance = (1 - weight) * (self.covariance + weight * more * longer)

    @property
    def varies(self) -> bool:
        """Whether sizes are so different that it matters."""
        return self.number >= LEAST and self.variance > (SPREAD * self.nbytes) ** 2 and self.seconds > 0

    @property
    def share(self) -> float:
        """The part of the mean length that is in proportion to the bytes, from 0 to 1."""
        return min(1.0, max(0.0, self.covariance / self.variance * self.nbytes / self.seconds))


class Lengths:
    """Seconds of work of tasks by prefix and bytes of inputs.

    A part of the length counts as proportional to the bytes, the rest as the same for all. So what is said is
    never farther from the mean than the inputs are from theirs.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def observe(self, prefix: str, nbytes: float, seconds: float) -> None:
        """A task of a prefix has taken so long for inputs of so many bytes."""
        self._known.setdefault(prefix, _Known()).observe(nbytes, seconds)

    def mean(self, prefix: str) -> float | None:
        """Of tasks whose inputs differ in size; None of others, and while too few are known."""
        known = self._known.get(prefix)
        return known.seconds if known is not None and known.varies else None

    def seconds(self, prefix: str, nbytes: float) -> float | None:
        """What a task takes with inputs of so many bytes; None as for :meth:`mean`."""
        known = self._known.get(prefix)
        if known is None or not known.varies:
            return None
        share = known.share
        return known.seconds * (1 - share + share * nbytes / known.nbytes)
