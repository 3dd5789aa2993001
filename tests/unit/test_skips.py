"""Fail the run if a test of GPUs is skipped on a host with a GPU, unless the reason is accepted."""

from __future__ import annotations

import pytest

from tests.helpers.gpus import unaccepted_skip


def report(said: str, *marks: str) -> pytest.TestReport:
    skip = ("test_file.py", 1, f"Skipped: {said}")
    return pytest.TestReport(
        "test_file.py::test", ("test_file.py", 1, "test"), dict.fromkeys(marks, 1), "skipped", skip, "setup"
    )


@pytest.mark.parametrize(
    ("said", "marks", "reason"),
    [
        ("cudf has no such column", ["gpu"], None),
        ("no reason at all", ["gpu"], "no reason at all"),
        ("no reason at all", [], None),
    ],
)
def test_only_known_reasons_skip_a_test_of_gpus(said: str, marks: list[str], reason: str | None) -> None:
    assert unaccepted_skip(report(said, *marks)) == reason
