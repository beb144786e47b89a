"""Muon on stacks of matrices, and products that are symmetric."""

import pytest
import torch
from torch import nn

from lib.fast.parts import muon as fast
from lib.optimizers import KELLER_JORDAN, Muon, newton_schulz

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("batch", "n", "terms"), [(2, 16, 16), (1, 1, 1), (3, 33, 50), (1, 70, 17)])
@pytest.mark.parametrize("adds", [False, True])
def test_half_of_a_symmetric_product_is_all_of_it(batch, n, terms, adds):
    torch.manual_seed(0)
    x = torch.randn(batch, terms, n, device=DEVICE).mT  # as a tall matrix is handed on
    add = torch.randn(batch, n, n, device=DEVICE)
    add = add + add.mT
    got = fast.symmetric_product(x, add, 0.5, -2.0) if adds else fast.symmetric_product(x, alpha=0.5)
    expected = 0.5 * (x.double() @ x.double().mT) - (2.0 * add.double() if adds else 0.0)
    torch.testing.assert_close(got.double(), expected, atol=0.05 if DEVICE == "cuda" else 1e-4, rtol=0.01)


@pytest.mark.parametrize("shape", [(2, 40, 24), (2, 24, 40), (1, 16, 16)])
def test_newton_schulz_by_halves_is_the_chapters(shape):
    torch.manual_seed(0)
    G = torch.randn(shape, device=DEVICE)
    got = fast.newton_schulz_by_halves(G, 5, KELLER_JORDAN, 1e-7, torch.float32)
    expected = newton_schulz(G.double(), 5, KELLER_JORDAN, 1e-7, None)
    torch.testing.assert_close(got.double(), expected, atol=0.02 if DEVICE == "cuda" else 1e-4, rtol=0)


def parameters():
    torch.manual_seed(0)
    shapes = [(12, 8), (8, 12), (12, 8), (3, 12, 8), (6, 2, 2, 3), (12, 8)]
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64, device=DEVICE)) for shape in shapes]


@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.8}])
def test_stacks_take_the_steps_of_single_matrices(settings):
    one_by_one, stacked = parameters(), parameters()
    settings = {"lr": 0.1, "ns_dtype": None, **settings}
    optimizers = Muon(one_by_one, **settings), fast.StackedMuon(stacked, **settings)
    for step in range(3):
        for mine, p in zip(one_by_one, stacked, strict=True):
            generator = torch.Generator(DEVICE).manual_seed(step)
            mine.grad = torch.randn(mine.shape, dtype=mine.dtype, device=DEVICE, generator=generator)
            p.grad = mine.grad.clone()
        stacked[2].grad = one_by_one[2].grad = None if step == 1 else one_by_one[2].grad
        for optimizer in optimizers:
            optimizer.step()
    for mine, p in zip(one_by_one, stacked, strict=True):
        torch.testing.assert_close(p, mine, rtol=1e-12, atol=1e-12)
        assert set(optimizers[1].state[p]) == set(optimizers[0].state[mine])
    with pytest.raises(ValueError, match="cautious=True: expected False"):
        fast.StackedMuon(parameters(), cautious=True)
