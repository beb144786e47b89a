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

KERNELS = {
    "forward": flash_hopper.hopper_forward_kernel,
    "dQ": flash_hopper.hopper_dq_kernel,
    "dK/dV": flash_hopper.hopper_dkdv_kernel,
}
PER_TILE = {"forward": ("k", "v"), "dQ": ("k", "v"), "dK/dV": ("q", "do")}  # the others come 64 rows at a time


def described(rows, width):
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], gl.bfloat16)
    return f"tensordesc<bf16{[rows, width]},{layout!r}>"


def machine_code(kernel, width, causal, cut: Roles):
    cut = complete(cut, kernel, width, 1, causal)
    fn, signature = KERNELS[kernel], {}
    for name in fn.arg_names:
        if name in ("T", "S", "n_rows"):
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
            signature[name] = described(cut.tile if name in PER_TILE[kernel] else 64, width)
    constants = {(fn.arg_names.index("CUT"),): cut}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if name in ("T", "S", "n_rows")}
    source = GluonASTSource(fn, signature, constants, divisible)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["sass"]


def main():
    assert not torch.cuda.is_initialized()
    found = {}
    for width, kernels in ((64, ("forward", "dQ", "dK/dV")), (128, ("dQ",))):  # all of them take a minute
        for kernel, cut in zip(KERNELS, ROLES_TABLE[width, True], strict=True):
            if isinstance(cut, Roles) and kernel in kernels:
                text = machine_code(kernel, width, True, cut)
                counts = {word: text.count(word) for word in ("HGMMA", "WARPGROUP.ARRIVE", "LDL", "USETMAXREG")}
                found[f"{kernel}, {width}"] = counts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
