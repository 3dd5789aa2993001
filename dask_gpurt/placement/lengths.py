"""How long tasks take, learned by prefix: with large inputs longer, as far as they have until now. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: The weight of the last task in what is known of its prefix, once there are as many.
WEIGHT = 0.05
#: Tasks of a prefix before anything is said of it: of so few that have nothing to do with their inputs
#: one in a hundred looks otherwise.
LEAST = 10
#: How far sizes depart from their mean, as a part of it; what part of the variance of lengths they explain.
SPREAD, EXPLAINED = 0.2, 0.7


@dataclass(slots=True)
class _Known:
    """Means and variances of bytes and of seconds, and their covariance."""

    number: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0
    of_nbytes: float = 0.0
    of_seconds: float = 0.0
    of_both: float = 0.0

    def observe(self, nbytes: float, seconds: float) -> None:
        self.number += 1
        weight = max(1 / self.number, WEIGHT)
        more, longer = nbytes - self.nbytes, seconds - self.seconds
        self.nbytes += weight * more
        self.seconds += weight * longer
        self.of_nbytes = (1 - weight) * (self.of_nbytes + weight * more * more)
        self.of_seconds = (1 - weight) * (self.of_seconds + weight * longer * longer)
        self.of_both = (1 - weight) * (self.of_both + weight * more * longer)

    @property
    def varies(self) -> bool:
        """Whether sizes are different, and tell lengths."""
        return (
            self.number >= LEAST
            and self.of_both > 0
            and self.of_nbytes > (SPREAD * self.nbytes) ** 2
            and self.of_both**2 > EXPLAINED * self.of_nbytes * self.of_seconds
        )

    @property
    def share(self) -> float:
        """The part of the mean length that is in proportion to the bytes, from 0 to 1."""
        return min(1.0, self.of_both / self.of_nbytes * self.nbytes / self.seconds)


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
        """Of tasks whose inputs tell their lengths; None of others, and while too few are known."""
        known = self._known.get(prefix)
        return known.seconds if known is not None and known.varies else None

    def seconds(self, prefix: str, nbytes: float) -> float | None:
        """What a task takes with inputs of so many bytes; None as for :meth:`mean`."""
        known = self._known.get(prefix)
        if known is None or not known.varies:
            return None
        share = known.share
        return known.seconds * (1 - share + share * nbytes / known.nbytes)
