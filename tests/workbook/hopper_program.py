"""Compile one of each kernel with roles for a Hopper GPU, on whatever machine this is, and print what its machine code has as JSON."""

import json

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from lib.fast import flash_hopper
from lib.fast.flash import ROLES_TABLE
from lib.fast.flash_hopper import FLAT, Roles, complete
from lib.fast.flash_launch import LENGTHS, Sizes

KERNELS = {
    "forward": flash_hopper.hopper_forward_kernel,
    "dQ": flash_hopper.hopper_dq_kernel,
    "dK/dV": flash_hopper.hopper_dkdv_kernel,
}
PER_TILE = {"forward": ("k", "v"), "dQ": ("k", "v"), "dK/dV": ("q", "do")}  # the others come 64 rows at a time


def described(rows, width):
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], gl.bfloat16)
    return f"tensordesc<bf16{[1, 1, rows, width]},{layout!r}>"


def machine_code(kernel, sizes: Sizes, cut: Roles):
    cut = complete(cut, kernel, sizes)
    fn, signature = KERNELS[kernel], {}
    for name in fn.arg_names:
        if name in (*LENGTHS, "n_rows", "padded"):
            signature[name] = "i32"
        elif name in ("scale", "scale2"):
            signature[name] = "fp32"
        elif name == "CUT":
            signature[name] = "constexpr"
        elif name == "stats" and kernel == "dK/dV":
            signature[name] = f"tensordesc<fp32{[cut.tile]},{FLAT!r}>"
        elif name in ("lse", "stats"):
            signature[name] = "*fp32"
        else:
            signature[name] = described(cut.tile if name in PER_TILE[kernel] else 64, sizes.width)
    constants = {(fn.arg_names.index("CUT"),): cut}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if name in ("n_rows", "padded")}
    source = GluonASTSource(fn, signature, constants, divisible)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["sass"]


def main():
    assert not torch.cuda.is_initialized()
    found = {}
    for width, length, kernels in ((64, 1024, ("forward", "dK/dV")), (64, 1000, ("forward",)), (128, 1024, ("dQ",))):
        for kernel, cut in zip(KERNELS, ROLES_TABLE[width, True], strict=True):  # all of them take a minute
            if isinstance(cut, Roles) and kernel in kernels:
                text = machine_code(kernel, Sizes(1, 16, 1, length, length, width, True), cut)
                counts = {word: text.count(word) for word in ("HGMMA", "WARPGROUP.ARRIVE", "LDL", "USETMAXREG")}
                found[f"{kernel}, {width}, {length}"] = counts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
