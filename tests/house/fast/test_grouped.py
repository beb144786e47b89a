"""The grouped products with roles for their warps, on a Hopper GPU; and four-bit weights times few rows."""

import pytest
import torch

from lib.fast.gluon import has_roles
from lib.fast.parts import grouped as fast
from lib.given.kernels import int4
from solutions.low_precision import pack_int4, quantize_int4
from solutions.moe import grouped_matmul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_roles = pytest.mark.skipif(
    not has_roles(torch.empty(0, device=DEVICE)), reason="warps have roles on a GPU of compute capability 9.0"
)


def parts(counts, C, F, dtype, transposed=False):
    torch.manual_seed(0)
    x, grad = (torch.randn(sum(counts), n, device=DEVICE).to(dtype) for n in (C, F))
    weights = (torch.randn(len(counts), C, F, device=DEVICE) / C**0.5).to(dtype)
    weights = weights.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weights
    return x, weights, grad, torch.tensor(counts, device=DEVICE)


def by_expert(left, right, counts):
    return [a.double() @ b.double() for a, b in zip(left.split(counts), right, strict=True)]


@needs_roles
@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("counts", "C", "F"),
    [
        ((128, 256, 64), 256, 512),
        ((0, 5, 300, 0, 129), 200, 264),
        ((1,), 64, 8),
        ((64,) * 40, 72, 1000),
        ((700, 0, 33), 4096, 256),
    ],
)
def test_products_of_experts_equal_their_own(counts, C, F, dtype, transposed):
    x, weights, grad, n = parts(counts, C, F, dtype, transposed)
    out = fast.grouped_matmul_fast(x, weights, n)
    expected = torch.cat(by_expert(x, weights, counts))
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    of_weights = fast.weight_gradients_fast(x, grad, n)
    expected = torch.stack(
        [a.double().T @ b.double() for a, b in zip(x.split(counts), grad.split(counts), strict=True)]
    )
    torch.testing.assert_close(of_weights.double(), expected, rtol=1e-2, atol=0.05)


@needs_roles
@pytest.mark.gpu
def test_what_is_no_number_stays_with_its_expert():
    x, _, grad, n = parts((100, 30, 70), 128, 256, torch.bfloat16)
    expected = fast.weight_gradients_fast(x, grad, n)
    x[100:130], grad[100:130] = float("nan"), float("inf")
    found = fast.weight_gradients_fast(x, grad, n)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
    assert found[1].isnan().all()


@needs_roles
@pytest.mark.gpu
def test_large_products_take_the_kernels_with_roles_and_small_ones_do_not(monkeypatch):
    taken, by_kernel = [], fast.grouped_matmul_fast
    monkeypatch.setattr(
        "lib.fast.parts.grouped.grouped_matmul_fast",
        lambda x, w, n, planned: taken.append(w.shape) or by_kernel(x, w, n, planned),
    )
    for n_rows in (64, 4096):
        x, weights, grad, n = parts((n_rows, n_rows), 512, 1024, torch.bfloat16)
        x.requires_grad_()
        weights.requires_grad_()
        grouped_matmul(x, weights, n).backward(grad)
    assert taken == [(2, 512, 1024), (2, 1024, 512)]


@pytest.mark.parametrize(("start", "n", "k", "group"), [(0, 5, 256, 32), (0, 40, 384, 128), (1, 9, 64, 64)])
def test_a_row_times_four_bits(start, n, k, group):
    torch.manual_seed(0)
    q, scale, zero = quantize_int4(torch.randn(n, k), group)
    x = torch.randn(start + k).half().to(DEVICE)[None, start:]  # an odd start is not aligned to four bytes
    out = int4.launch_one_row(x, pack_int4(q).to(DEVICE), scale.to(DEVICE), zero.to(DEVICE))
    expected = x.double().cpu() @ int4.dequantize_int4(q, scale, zero).double().T
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-3, atol=2e-2)
