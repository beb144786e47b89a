"""Loads what a process's first dispatch mode needs, which can take seconds, before any check is timed."""

import torch
from torch.utils.flop_counter import FlopCounterMode

COUNTING = ("flops", "saved_activation", "attention_activation", "memory_timeline")


def pytest_collection_finish(session):
    checks = [item.name for item in session.items if "chapter_08" in item.nodeid]
    if any(word in name for name in checks for word in COUNTING):
        with FlopCounterMode(display=False):
            torch.ones(1, 1) @ torch.ones(1, 1)
        x = torch.ones(1, requires_grad=True)
        torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)
