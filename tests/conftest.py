"""Shared test settings."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors are small: more threads only wait for each other

settings.register_profile("megamoe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("megamoe")
