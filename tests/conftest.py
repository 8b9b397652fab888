"""One thread: what is tested to the bit must not depend on how many cores the machine has. No test depends on how fast
it is, either."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines advertise AMX and lack it
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked of the network, which would be asked five times

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

# A background job ignores these, and so would every process that the tests start and send them to.
for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take long come first: at the end both workers are busy."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
