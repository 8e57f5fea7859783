"""Tests; those of several processes share the cores, and so each computes with one thread.

More threads of OpenBLAS, or of OpenMP in torch, would wait for each other by spinning. Both read
these variables when NumPy or torch is imported, which is later.
"""

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
