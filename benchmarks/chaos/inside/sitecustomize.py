"""What a disturbed process suffers from within: a clock that is wrong by minutes, and a store that fails for a while.

Python imports this file first in a process whose PYTHONPATH has this folder. CHAOS_CLOCK is the error of the clock in
seconds. While the file CHAOS_FAULTS exists, one request in two fails, and the others are late.
"""

import os
import random
import time

if offset := float(os.environ.get("CHAOS_CLOCK", "0")):
    right = time.time
    time.time = lambda: right() + offset

if faults := os.environ.get("CHAOS_FAULTS"):
    import obstore

    def troubled(request):
        def asked(*args, **options):
            if os.path.exists(faults):
                time.sleep(random.uniform(0, 1))
                if random.random() < 0.5:
                    raise OSError("the store is out of order")
            return request(*args, **options)

        return asked

    for name in ("put", "get", "list_with_delimiter"):
        setattr(obstore, name, troubled(getattr(obstore, name)))
