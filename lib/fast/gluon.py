"""Gluon, the language below Triton, as the kernels with roles for a Hopper GPU's warps share it: names, layouts,
and the ring's barriers.
"""

import torch
from torch import Tensor

from lib.fast.launch import VERSION
from lib.given.kernels.tiles import INTERPRETED

KNOWN = (
    (3, 6),
    (3, 7),
    (3, 8),
    (3, 9),
)  # versions of Triton that compile these kernels; Gluon is young, and its names change
PROVEN = ((3, 6),)  # versions whose code passed tests/house/fast/test_flash_hopper.py on a GPU

GLUON = not INTERPRETED and VERSION in KNOWN


def has_roles(x: Tensor) -> bool:
    """Whether kernels with roles run on x's device: compute capability 9.0 exactly,
    and a version of Triton in PROVEN.
    """
    return GLUON and VERSION in PROVEN and x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


if GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: F401 - for the modules of kernels
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    fence_async_shared = hopper.fence_async_shared
    copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the first name since Triton 3.9
    copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

    RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # in newer versions of Triton
    FLAT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)

    @gluon.constexpr_function
    def acc(n):
        """Layout of a group's [64, n] float32 accumulator, to which tensor cores add."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])

    @gluon.jit
    def as_box(shared, descriptor):
        """The same memory with the four dimensions of what the TMA copies."""
        if RENAMED:
            return shared.reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)
        else:  # noqa: RET505
            return shared._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)

    @gluon.jit
    def barriers(N: gl.constexpr, COUNT: gl.constexpr):
        """N barriers, of which each opens after COUNT arrivals.

        Some role must use them. The compiler gives the memory of barriers that nobody uses to other data, and on GPUs
        that several processes shared, such data was overwritten.
        """
        made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(N):
            mbarrier.init(made.index(i), count=COUNT)
        return made

    @gluon.jit
    def wait_full(full, n, CUT: gl.constexpr):
        mbarrier.wait(full.index(n % CUT.stages), (n // CUT.stages) & 1)

    @gluon.jit
    def wait_empty(empty, n, CUT: gl.constexpr):
        """Wait until place n is free. In the first round it is free from the start."""
        mbarrier.wait(empty.index(n % CUT.stages), ((n // CUT.stages) & 1) ^ 1)

    @gluon.jit
    def release(empty, n, CUT: gl.constexpr):
        mbarrier.arrive(empty.index(n % CUT.stages))
