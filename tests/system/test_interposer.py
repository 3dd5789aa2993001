"""Run the interposer on a fake driver: what it changes, what it must not change, and other interposers.

Each test has a process that loads both, as a worker does; the fake driver records launches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dask_gpurt.overlap.interposer import DeviceLimits, name_id
from tests.helpers.examples import examples
from tests.helpers.interposer.sm_model import residency, shared_for
from tests.helpers.interposers import (
    H200,
    HEADER,
    INTERPOSER,
    SMALL,
    Process,
    build_launcher,
    compile_c,
    needs_compiler,
    process,
)
from tests.helpers.interposers import built as built  # a fixture
from tests.helpers.interposers import one as one  # a fixture

pytestmark = needs_compiler

FOUR, TWO = shared_for(H200, 4), shared_for(H200, 2)


@pytest.fixture(scope="module")
def shared_process(built: Path) -> Iterator[Process]:
    with process(built / "libcuda.so.1", built / "_interposer.so") as one:
        one.load()
        yield one


DOORS: list[dict[str, Any]] = [
    {"name": name, "door": door, "flags": flags}
    for name in ("cuLaunchKernel", "cuLaunchKernelEx")
    for door, flags in [
        ("dlsym", 0),
        *((door, flags) for door in ("cuGetProcAddress", "cuGetProcAddress_v2") for flags in (0, 1, 2)),
    ]
] + [{"name": f"{name}_ptsz", "door": "dlsym"} for name in ("cuLaunchKernel", "cuLaunchKernelEx")]


def only(launch: dict[str, Any]) -> int:
    """Return the shared memory of a launch that reached the driver exactly once, successfully."""
    assert launch["result"] == 0
    (shared,) = launch["shared"]
    return int(shared)


# ---- what it changes -----------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS, ids=lambda door: "-".join(map(str, door.values())))
def test_every_door_to_a_launch_is_met(shared_process: Process, door: dict[str, Any]) -> None:
    one, attributes = shared_process, {"attributes": [1]} if "Ex" in door["name"] else {}
    one.fake("fake_use", 0)
    one.clear()
    function = one.function()
    assert only(one.launch(function, **attributes, **door)) == 0, "no caps yet"
    one.apply(4)
    launch = one.launch(function, **attributes, **door)
    assert only(launch) == FOUR
    assert launch["per_thread"] == [door.get("flags") == 2 or "ptsz" in door["name"]]
    assert launch["ex"] == ["Ex" in door["name"]]
    one.clear()
    assert only(one.launch(function, **attributes, **door)) == 0


@given(
    device=st.sampled_from([(0, H200), (1, SMALL)]),
    cap=st.integers(1, 16),
    threads=st.integers(1, 1024),
    registers=st.integers(1, 255),
    static=st.just(0) | st.integers(0, 40_000),
    dynamic=st.just(0) | st.integers(0, 9_000),
    blocks=st.just(3000) | st.integers(1, 3000),
)
@example((0, H200), 5, 256, 64, 0, 0, 3000)  # registers allow 4 blocks
@example((1, SMALL), 5, 256, 64, 0, 0, 3000)
@examples(60)
def test_of_any_kernel_no_more_blocks_than_the_cap_stay_on_an_sm(
    shared_process: Process,
    device: tuple[int, DeviceLimits],
    cap: int,
    threads: int,
    registers: int,
    static: int,
    dynamic: int,
    blocks: int,
) -> None:
    ordinal, limits = device
    shared_process.fake("fake_use", ordinal)
    shared_process.apply(cap)
    function = shared_process.function("kernel", registers, static)
    given = only(shared_process.launch(function, grid=(blocks, 1, 1), block=(threads, 1, 1), shared=dynamic))
    before = residency(limits, threads, registers, static + dynamic)
    after = residency(limits, threads, registers, static + given)
    if before <= cap or blocks <= cap * limits.sms:
        assert given == dynamic
    else:
        assert after == cap
        assert static + given == shared_for(limits, cap)


def test_a_kernel_has_its_own_cap_or_none(one: Process) -> None:
    named, exempt, other = one.function("named"), one.function("exempt"), one.function("other")
    one.apply(None, {"named": 2})
    assert [only(one.launch(handle)) for handle in (named, exempt, other)] == [TWO, 0, 0]
    one.apply(4, {"named": 2, "exempt": None})
    assert [only(one.launch(handle)) for handle in (named, exempt, other)] == [TWO, 0, FOUR]
    one.apply(4, {"named": 4})
    assert [only(one.launch(handle)) for handle in (named, exempt, other)] == [FOUR] * 3
    assert one.counters() == {"seen": 9, "capped": 6, "left.no-cap": 3}


def test_launched_kernels_are_known_by_name(one: Process) -> None:
    long = "_ZN" + "a" * 4000
    one.apply(4, {long: 2})
    handles = [one.function("sum", 40, 512), one.function(long)]
    assert [only(one.launch(handle)) for handle in handles] == [FOUR - 512, TWO]
    one.launch(handles[0], grid=(1, 1, 1))
    first, second = one.kernels()
    assert first == {
        "name": "sum",
        "registers": 40,
        "shared": 512,
        "launches": 2,
        "capped": 1,
        "refused": False,
        "id": name_id("sum"),
    }
    assert (second["name"], second["id"]) == (long[:255], name_id(long))
    one.apply(None, {str(second["id"]): 4})
    assert [only(one.launch(handle)) for handle in handles] == [0, FOUR], (
        "by an id, which knows the whole name"
    )


def test_a_kernel_of_a_library_is_resolved_for_each_device(one: Process) -> None:
    functions = one.function("kernel", 32, 1024), one.function("kernel", 32, 2048)
    kernel = one.kernel(*functions)
    one.apply(4)
    assert only(one.launch(kernel)) == FOUR - 1024
    one.fake("fake_use", 1)
    assert only(one.launch(kernel)) == shared_for(SMALL, 4) - 2048
    one.fake("fake_use", 0)
    assert only(one.launch(kernel, attributes=[])) == FOUR - 1024


def test_more_than_48_kib_are_opted_in_to_once_for_each_function(one: Process) -> None:
    functions = [one.function(f"kernel{i}", 32, 256) for i in range(3)]
    for cap in (4, 3, 2, 1, 3):
        one.apply(cap)
        for function in functions[:2]:
            assert only(one.launch(function)) == shared_for(H200, cap) - 256
    assert [one.fake("fake_sets", function) for function in functions] == [1, 1, 0]


# ---- what it must not change ---------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        ({"attributes": [2]}, "cooperative"),
        ({"attributes": [1, 8, 2]}, "cooperative"),
        ({"attributes": [4]}, "cluster"),
        ({"attributes": [11]}, "cluster"),
        ({"grid": (4 * 132, 1, 1)}, "small-grid"),
        ({"grid": (2, 2, 132)}, "small-grid"),
        ({"grid": (0, 1, 1)}, "small-grid"),
        ({"block": (0, 1, 1)}, "small-grid"),
        ({"block": (512, 1, 1)}, "at-most-the-cap"),
        ({"block": (8, 8, 8)}, "at-most-the-cap"),
        ({"shared": FOUR}, "at-most-the-cap"),
        ({"shared": 48_000}, "at-most-the-cap"),
    ],
)
def test_launches_that_are_left_alone(one: Process, launch: dict[str, Any], why: str) -> None:
    one.apply(4)
    given = launch.get("shared", 0)
    assert only(one.launch(one.function(), **launch)) == given
    assert one.counters() == {"seen": 1, f"left.{why}": 1}


def test_one_block_more_than_a_small_grid_is_capped(one: Process) -> None:
    one.apply(4)
    assert only(one.launch(one.function(), grid=(4 * 132 + 1, 1, 1))) == FOUR


def test_a_kernel_that_was_compiled_for_clusters_is_left_alone(one: Process) -> None:
    one.apply(4)
    assert only(one.launch(one.function("clustered", 32, 0, 2))) == 0
    assert one.counters() == {"seen": 1, "left.cluster": 1}


def test_launches_captured_in_a_graph_are_not_changed(one: Process) -> None:
    one.apply(4)
    function, capturing, plain = one.function(), one.stream(True), one.stream(False)
    per_thread = {"name": "cuLaunchKernel_ptsz"}
    assert only(one.launch(function, stream=capturing)) == 0
    assert only(one.launch(function, stream=plain)) == FOUR
    one.fake("fake_capture", 0, 1)
    assert only(one.launch(function, **per_thread)) == 0, "the thread's own null stream"
    assert only(one.launch(function, stream=2)) == 0
    assert only(one.launch(function)) == FOUR
    one.fake("fake_capture", 1, 0)
    assert only(one.launch(function)) == 0, "another thread captures, so the null stream cannot tell"
    assert one.counters() == {"seen": 6, "capped": 2, "left.capture": 4}


def test_without_a_context_nothing_is_done(one: Process) -> None:
    one.apply(4)
    function = one.function()
    one.fake("fake_use", -1)
    assert only(one.launch(function)) == 0
    assert one.counters() == {"seen": 1, "left.unknown": 1}


@pytest.mark.parametrize("name", ["cuGetExportTable", "cuLaunchCooperativeKernel", "cuFuncGetAttribute"])
def test_all_other_functions_are_the_drivers_own(built: Path, one: Process, name: str) -> None:
    doors = [{"name": name}, {"name": name, "door": "cuGetProcAddress_v2"}]
    assert one.same(*doors)
    assert not one.same({"name": "cuLaunchKernel"}, {"name": "cuLaunchKernelEx"})
    with process(built / "libcuda.so.1") as bare:
        assert bare.same(*doors)


def test_a_lookup_of_the_lookup_itself_is_answered(one: Process) -> None:
    for cuda, version in ((11_030, "cuGetProcAddress"), (13_000, "cuGetProcAddress_v2")):
        asked = {"name": "cuGetProcAddress", "door": "cuGetProcAddress_v2", "cuda": cuda}
        assert one.same(asked, {"name": version})
        one.forget()


def test_a_function_that_the_driver_lacks_stays_missing(one: Process) -> None:
    with pytest.raises(RuntimeError, match="cuGetProcAddress_v2"):
        one.launch(one.function(), name="cuLaunchNothing", door="cuGetProcAddress_v2")


# ---- failure -------------------------------------------------------------------------


@pytest.mark.parametrize("attributes", [None, []])
def test_a_launch_that_fails_is_repeated_as_it_was_and_the_kernel_is_let_be(
    one: Process, attributes: list[int] | None
) -> None:
    picky, other = one.function("picky"), one.function("other")
    one.fake("fake_refuse_above", picky, 40_000)
    one.apply(4)
    first = one.launch(picky, shared=16, attributes=attributes)
    assert (first["result"], first["shared"]) == (0, [FOUR, 16])
    for cap in (4, 6, 2, 4):
        one.apply(cap)
        assert only(one.launch(picky, shared=16, attributes=attributes)) == 16
    assert only(one.launch(other, attributes=attributes)) == FOUR
    assert one.counters() == {"seen": 6, "capped": 2, "repeated": 1, "left.refused": 4}
    assert [kernel["refused"] for kernel in one.kernels()] == [True, False]


def test_a_launch_that_fails_by_itself_fails_as_without_us(one: Process) -> None:
    broken = one.function()
    one.fake("fake_refuse_above", broken, -1)
    one.apply(4)
    assert one.launch(broken) == {
        "result": 1,
        "shared": [FOUR, 0],
        "per_thread": [False, False],
        "ex": [False, False],
    }
    assert one.launch(broken)["shared"] == [0]


def test_where_the_driver_does_not_grant_more_than_48_kib_the_launch_is_left_alone(one: Process) -> None:
    one.fake("fake_refuse_sets", 1)
    function = one.function()
    one.apply(2)
    assert [only(one.launch(function)) for _ in range(3)] == [0, 0, 0]
    assert one.counters() == {"seen": 3, "left.no-opt-in": 3}
    assert one.fake("fake_sets", function) == 1
    one.apply(4)
    assert only(one.launch(function)) == FOUR


def test_a_handle_may_become_another_kernels(one: Process) -> None:
    handle, picky = one.function("old"), one.function("picky")
    one.fake("fake_refuse_above", handle, 40_000)
    one.fake("fake_refuse_above", picky, 40_000)
    one.apply(4, {"new": 2})
    assert len(one.launch(handle)["shared"]) == len(one.launch(picky)["shared"]) == 2
    assert one.fake("cuModuleUnload", 1) == 0
    one.become(handle, "new", 32, 128)
    assert only(one.launch(handle)) == TWO - 128
    assert only(one.launch(picky)) == 0, "it is still the same"


# ---- other interposers ---------------------------------------------------------------


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("door", ["dlsym", "cuGetProcAddress_v2"])
def test_a_second_interposer_sees_every_launch(built: Path, ours_first: bool, door: str) -> None:
    preload = [built / "_interposer.so", built / "second.so"]
    with process(built / "libcuda.so.1", *(preload if ours_first else preload[::-1])) as both:
        both.load()
        function = both.function()
        assert only(both.launch(function, door=door)) == 0
        both.apply(4)
        assert only(both.launch(function, door=door)) == FOUR
        assert both.symbol(str(built / "second.so"), "second_launches") == 2


@pytest.mark.parametrize("ours_first", [True, False])
def test_one_that_passes_over_others_does_so_unless_it_comes_last(built: Path, ours_first: bool) -> None:
    preload = [built / "_interposer.so", built / "rude.so"]
    with process(built / "libcuda.so.1", *(preload if ours_first else preload[::-1])) as both:
        both.load()
        both.apply(4)
        assert only(both.launch(both.function())) == (FOUR if ours_first else 0)
        assert both.symbol(str(built / "rude.so"), "second_launches") == 1
        assert bool(both.counters()) == ours_first


def test_two_copies_of_it_cap_once(built: Path, tmp_path: Path) -> None:
    copy = shutil.copy(built / "_interposer.so", tmp_path / "copy.so")
    with process(built / "libcuda.so.1", built / "_interposer.so", Path(copy)) as twice:
        twice.load()
        twice.apply(4)
        assert only(twice.launch(twice.function())) == FOUR


def test_a_wrapper_that_uses_rtld_next_finds_the_next(built: Path) -> None:
    """The C library resolves by the caller's address, which must not be ours."""
    path = built / "next.so"
    with process(built / "libcuda.so.1", built / "_interposer.so", path) as wrapped:
        assert wrapped.symbol(str(path), "getppid") < 0


def test_in_a_forked_child_it_goes_on(one: Process) -> None:
    function = one.function()
    one.apply(4)
    one.launch(function)
    forked = one.fork("launch", handle=function)
    assert forked["status"] == 0
    assert only(forked["answer"]) == FOUR
    assert one.fork("counters")["answer"]["seen"] == one.counters()["seen"] == 1


def test_caps_may_be_set_before_there_is_a_driver(built: Path) -> None:
    with process(None, built / "_interposer.so") as early:
        early.load()
        early.apply(4)
        assert early.limits(0) is None
        early.load_driver(str(built / "libcuda.so.1"))
        assert early.limits(0) == vars(H200)
        assert only(early.launch(early.function())) == FOUR


def test_it_reads_the_limits_of_each_device(one: Process) -> None:
    assert one.limits(0) == vars(H200)
    assert one.limits(1) == vars(SMALL)
    assert one.limits(2) is None


def test_without_it_the_reason_is_told(built: Path) -> None:
    with (
        process(built / "libcuda.so.1") as none,
        pytest.raises(RuntimeError, match=r"not built|without the interposer in LD_PRELOAD"),
    ):
        none.load()


def test_a_library_of_another_version_is_not_touched(built: Path, tmp_path: Path) -> None:
    (tmp_path / HEADER.name).write_text(HEADER.read_text().replace("LAYOUT = 2", "LAYOUT = 1"))
    sources = [shutil.copy(source, tmp_path) for source in INTERPOSER]
    other = compile_c(tmp_path / "other.so", *map(Path, sources), flags=("-std=c11", "-shared", "-fPIC"))
    with (
        process(built / "libcuda.so.1", other) as one,
        pytest.raises(RuntimeError, match="of another version: install dask-gpurt again"),
    ):
        one.load()


# ---- details -------------------------------------------------------------------------


def test_the_id_of_a_name_is_that_of_the_published_hash() -> None:
    """Two published test vectors of FNV-1a."""
    assert name_id("") == 0xCBF29CE484222325
    assert name_id("foobar") == 0x85944171F73967E8


# ---- under sanitizers, while threads launch, policies change, modules unload and processes fork ----
#
# The processes are C programs: sanitizers cannot track the memory of Python's allocator.

#: Compiler flags, and number of forks: the thread sanitizer does not support forks.
SANITIZERS = {
    "none": ((), 20),
    "address": (("-fsanitize=address,undefined", "-fno-sanitize-recover=all"), 5),
    "thread": (("-fsanitize=thread", "-Wno-tsan"), 0),
}


def has_sanitizer(folder: Path, flags: tuple[str, ...]) -> bool:
    """Return whether a program built with the sanitizer runs: its library may be missing."""
    source = folder / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    try:
        return subprocess.run([compile_c(folder / "empty", source, flags=flags)]).returncode == 0
    except AssertionError:
        return False


def launch(launcher: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [launcher, *map(str, arguments)],
        env={**os.environ, "LD_LIBRARY_PATH": str(launcher.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_every_launch_is_as_it_was_or_capped(tmp_path: Path, sanitizer: str) -> None:
    flags, forks = SANITIZERS[sanitizer]
    if not has_sanitizer(tmp_path, flags):
        pytest.skip(f"the compiler's library for -fsanitize={sanitizer} is missing")
    done = launch(build_launcher(tmp_path, *flags), "stress", 4, 10_000, forks)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
