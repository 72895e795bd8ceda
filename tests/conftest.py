"""Settings that all tests share."""

import torch
from hypothesis import settings

# one thread per worker: the tests' tensors are small, and pytest-xdist fills the cores already
torch.set_num_threads(1)

# the same examples on every machine; timing says nothing on a busy one
settings.register_profile("hesscale", deadline=None, derandomize=True, max_examples=15)
settings.load_profile("hesscale")
