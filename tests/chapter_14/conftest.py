"""Runs these checks on one thread: their tensors are small, and on a busy machine threads would only wait for
each other.
"""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)
