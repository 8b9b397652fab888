"""One thread: what is tested to the bit must not depend on how many cores the machine has."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines advertise AMX and lack it

import torch

torch.set_num_threads(1)
