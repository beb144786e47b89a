"""Muon on stacks of matrices, and products that are symmetric."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lib.bench.kit import spawn
from lib.fast.parts import muon as fast
from lib.optimizers import KELLER_JORDAN, Muon, ShardedMuon, newton_schulz
from lib.ranks import pool

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


SHAPES = [(12, 8), (7, 12), (12, 8), (1, 6), (7, 12), (12, 8), (5, 3)]


def sharded_and_whole(rank: int, world_size: int, device: torch.device | str = "cpu") -> tuple[float, float, list[int]]:
    """How far matrices in stacks on ranks are from those of one process after three steps, cut by rows and in copies
    whose rate is a tensor, and what was sent.
    """
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, dtype=torch.float64, device=device)) for shape in SHAPES]
    cut = [slice(rank * size, (rank + 1) * size) for size in (-(-shape[0] // world_size) for shape in SHAPES)]
    copies = [[nn.Parameter(p.detach()[part].clone()) for p, part in zip(whole, cut, strict=True)] for _ in range(2)]
    settings: dict[str, Any] = {"lr": 0.1, "ns_dtype": None, "adjust_lr_fn": "match_rms_adamw"}
    makers = (fast.StackedShardedMuon, ShardedMuon)
    sharded = [make(parts, SHAPES, **settings) for make, parts in zip(makers, copies, strict=True)]
    reference, sent, send = Muon(whole, **settings), [], dist.all_to_all_single
    copied = [nn.Parameter(p.detach().clone()) for p in whole]
    divided = fast.StackedMuon(copied, ranks=dist.group.WORLD, **{**settings, "lr": whole[0].new_tensor(0.1)})
    dist.all_to_all_single = lambda out, row, *more, **named: (sent.append(row.numel()), send(out, row, *more, **named))
    for step in range(3):
        for i, (p, part) in enumerate(zip(whole, cut, strict=True)):
            p.grad = None if (step, i) == (1, 2) else torch.randn(p.shape, dtype=p.dtype, device=device)
            copied[i].grad = p.grad
            for parts in copies:
                parts[i].grad = None if p.grad is None else p.grad[part].clone()
        for optimizer in (reference, divided, *sharded):
            optimizer.step()
    dist.all_to_all_single = send
    pairs = [(p.detach()[part] - mine, reference.state[p]["momentum_buffer"][part] - momentum["momentum_buffer"])
             for p, part, mine in zip(whole, cut, copies[0], strict=True)
             for momentum in (sharded[0].state[mine],)]  # fmt: skip
    far = max(float((p.detach() - mine).abs().max()) for p, mine in zip(whole, copied, strict=True))
    return max(float(d.abs().max()) for pair in pairs for d in pair if d.numel()), far, sent


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_stacks_of_ranks_are_one_process_bit_for_bit(n_ranks):
    for distance, far, sent in pool("gloo").run(sharded_and_whole, n_ranks=n_ranks, time_limit_s=60).values:
        assert distance == 0
        assert far < 1e-12
        assert sent[0::4] == sent[2::4]  # both optimizers send as much to the owners
        assert sent[1::4] == sent[3::4]  # and back


def on_gpus(rank, device, folder):
    torch.save(sharded_and_whole(rank, dist.get_world_size(), device), folder / f"{rank}.pt")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.time_limit(120)
def test_stacks_of_two_gpus_are_one_process(tmp_path):
    spawn(on_gpus, "nccl", 2, tmp_path, limit_s=100)
    for rank in range(2):
        distance, far, sent = torch.load(tmp_path / f"{rank}.pt")
        assert max(distance, far) < 1e-12
        assert sent[0::4] == sent[2::4]
