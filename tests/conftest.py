import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

# Plots are drawn to files, also where there is a display.
os.environ.setdefault("MPLBACKEND", "Agg")

# pytest-xdist runs one process per core; more threads would only wait for each other. One thread also keeps
# the order of summation the same on machines with more or fewer cores.
torch.set_num_threads(1)

# The same examples at every run; `pytest --hypothesis-profile=explore` looks for new ones.
settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def seeded():
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (third-party code draws from it)
    torch.manual_seed(0)


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt: a process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
