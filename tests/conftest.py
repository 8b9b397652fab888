"""One thread: what is tested to the bit must not depend on how many cores the machine has. No test depends on how fast
it is, either."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines advertise AMX and lack it

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
