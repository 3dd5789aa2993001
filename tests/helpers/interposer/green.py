"""Check properties of green contexts on a GPU, one per function; one line of JSON lists the failures.

LD_PRELOAD=_interposer.so python tests/helpers/interposer/green.py
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from typing import Any

import cudf
import cupy

from dask_gpurt.device.cuda import CudaDevice
from dask_gpurt.overlap.interposer import redirect_context

#: Each block records its SM and stays a while, so that all SMs get blocks.
WHERE = r"""
extern "C" __global__ void where(unsigned int *seen) {
    unsigned int sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    seen[sm] = 1;
    for (long long until = clock64() + 20000; clock64() < until;);
}
"""
#: SMs by which a device may enlarge a green context, where a module uses dynamic parallelism.
LENT = 2
#: SMs taken from compute.
TAKEN = 16


def sms_seen(kernel: Any) -> int:
    seen = cupy.zeros(1024, "uint32")
    kernel((8192,), (128,), (seen,))
    return int(seen.sum())


def a_kernel_gets_the_sms_that_it_may_have(contexts: Any) -> None:
    kernel = cupy.RawKernel(WHERE, "where")
    assert sms_seen(kernel) == contexts.total
    sms = contexts.total - TAKEN
    contexts.try_out(sms)
    with contexts.entered(sms):
        assert sms - TAKEN < sms_seen(kernel) <= sms + LENT
    assert sms_seen(kernel) == contexts.total


def work_is_ordered_on_the_way_in_and_out(contexts: Any) -> None:
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


def a_thread_of_its_own_has_a_context_of_its_own(contexts: Any) -> None:
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


def streams_of_a_confined_thread_are_not_confined(contexts: Any) -> None:
    kernel, device = cupy.RawKernel(WHERE, "where"), CudaDevice()
    with contexts.entered(contexts.total - TAKEN):
        device.memory()
        _, stream = device.stream()
        assert sms_seen(kernel) <= contexts.total - TAKEN + LENT
    with stream:
        assert sms_seen(kernel) == contexts.total
        stream.synchronize()


def libcudf_gives_the_same_results(contexts: Any) -> None:
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


def what_comes_to_the_host_was_computed_before(contexts: Any) -> None:
    """Check that copies to the host wait: cupy uses the primary context, which does not wait for others."""
    kernel, sms = cupy.RawKernel(WHERE, "where"), contexts.total - TAKEN
    for _ in range(200):
        with contexts.entered(sms):
            seen = [sms_seen(kernel) for _ in range(2)]
        assert all(sms - TAKEN < number <= sms + LENT for number in seen), seen


def who_makes_the_usual_context_current_stays_confined(contexts: Any) -> None:
    kernel, sms = cupy.RawKernel(WHERE, "where"), contexts.total - TAKEN
    with contexts.entered(sms):
        cupy.cuda.runtime.setDevice(0)
        assert sms_seen(kernel) <= sms + LENT
    assert sms_seen(kernel) == contexts.total


CHECKS: tuple[Callable[[Any], None], ...] = (
    a_kernel_gets_the_sms_that_it_may_have,
    work_is_ordered_on_the_way_in_and_out,
    a_thread_of_its_own_has_a_context_of_its_own,
    streams_of_a_confined_thread_are_not_confined,
    libcudf_gives_the_same_results,
    what_comes_to_the_host_was_computed_before,
    who_makes_the_usual_context_current_stays_confined,
)


def main() -> None:
    contexts = CudaDevice().sm_contexts(redirect_context)
    wrong = {}
    for check in CHECKS:
        try:
            check(contexts)
        except Exception:
            wrong[check.__name__] = traceback.format_exc()
    checked = [check.__name__ for check in CHECKS]
    print(json.dumps({"sms": contexts.total - TAKEN, "checked": checked, "wrong": wrong}))


if __name__ == "__main__":
    main()
