"""Green contexts on a GPU: how many SMs a kernel gets, what is ordered around it, equal results."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from clusters import cluster

import dask_gpurt

pytestmark = pytest.mark.gpu

#: Each block says which SM it is on, and stays a while, so that all SMs get some.
WHERE = r"""
extern "C" __global__ void where(unsigned int *seen) {
    unsigned int sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    seen[sm] = 1;
    for (long long until = clock64() + 20000; clock64() < until;);
}
"""
#: A device may lend a green context two SMs more, where a module uses dynamic parallelism.
LENT = 2
#: SMs that are taken from compute.
TAKEN = 16


@pytest.fixture(scope="module")
def contexts() -> Any:
    from dask_gpurt.device.cuda import CudaDevice

    return CudaDevice().sm_contexts()


def sms_seen(kernel: Any) -> int:
    import cupy

    seen = cupy.zeros(1024, "uint32")
    kernel((8192,), (128,), (seen,))
    return int(seen.sum())


def test_a_kernel_gets_the_sms_that_it_may_have(contexts: Any) -> None:
    import cupy

    kernel = cupy.RawKernel(WHERE, "where")
    assert sms_seen(kernel) == contexts.total
    sms = contexts.total - TAKEN
    contexts.try_out(sms)
    with contexts.entered(sms):
        assert sms - TAKEN < sms_seen(kernel) <= sms + LENT
    assert sms_seen(kernel) == contexts.total


def test_work_is_ordered_on_the_way_in_and_out(contexts: Any) -> None:
    import cupy

    values = cupy.zeros(1 << 26)
    for _ in range(10):
        for _ in range(20):
            values += 1
        with contexts.entered(contexts.total - TAKEN):
            for _ in range(20):
                values -= 1
            values += 5
        values *= 1
    assert bool((values == 50).all())


def test_a_thread_of_its_own_has_a_context_of_its_own(contexts: Any) -> None:
    import cupy

    sums: list[int] = []

    def add_up() -> None:
        with contexts.entered(contexts.total - TAKEN):
            sums.append(int(cupy.arange(1 << 20).sum()))

    threads = [threading.Thread(target=add_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == 3 * [(1 << 19) * ((1 << 20) - 1)]


def test_streams_of_a_confined_thread_are_not_confined(contexts: Any) -> None:
    import cupy

    from dask_gpurt.device.cuda import CudaDevice

    kernel, device = cupy.RawKernel(WHERE, "where"), CudaDevice()
    with contexts.entered(contexts.total - TAKEN):
        device.memory()
        _, stream = device.stream()
        assert sms_seen(kernel) <= contexts.total - TAKEN + LENT
    with stream:
        assert sms_seen(kernel) == contexts.total
        stream.synchronize()


def test_libcudf_gives_the_same_results(contexts: Any) -> None:
    import cudf
    import cupy

    random = cupy.random.RandomState(1)
    key, value = (random.randint(0, 1 << bits, 1 << 22) for bits in (16, 40))
    frame = cudf.DataFrame({"key": key, "value": value})
    each = cudf.DataFrame({"key": cupy.arange(1 << 16), "weight": cupy.arange(1 << 16) * 3})

    def results() -> list[Any]:
        joined = frame.merge(each, on="key").sort_values(["key", "value"], ignore_index=True)
        return [frame.groupby("key").sum().sort_index().to_pandas(), joined.to_pandas()]

    plain = results()
    with contexts.entered(contexts.total - TAKEN):
        confined = results()
    assert all(one.equals(other) for one, other in zip(plain, confined, strict=True))


def test_the_mode_fixed_confines_tasks_beside_a_run(contexts: Any) -> None:
    fixed = {"overlap__mode": "fixed", "overlap__fixed__sms": contexts.total - TAKEN}

    def double(number: int) -> int:  # travels with the task, unlike a function of this module
        import cupy

        return int((cupy.arange(1000) * 2).sum())

    with cluster("cudf", **fixed) as client:
        run = ("run of the test", 1)
        client.run(lambda dask_worker: dask_worker.plugins["gpurt"].exchange.run_begins(run))
        client.gather(client.map(double, range(8)))
        client.run(lambda dask_worker: dask_worker.plugins["gpurt"].exchange.run_ends(run))
        for reply in dask_gpurt.report(client)["workers"].values():
            assert "compute is not confined" not in reply["fallbacks"]
            assert reply["overlap"]["launches"]["confined to SMs"] > 0
