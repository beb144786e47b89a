"""Compile kernels with roles for a Hopper GPU, on whatever machine this is,
and print what their machine code has as JSON: one form of each kernel, or with ``--all`` every form.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from lib.fast.attention.flash import ROLES_TABLE, launch_dkdv, launch_dq, launch_forward
from lib.fast.attention.flash_hopper import Roles
from lib.fast.attention.flash_items import deal
from lib.fast.attention.flash_stored import backward_launch, for_device
from lib.fast.attention.flash_wide import ROLES
from lib.fast.attention.flash_wide_hopper import hopper_wide
from lib.fast.launch import Address, Box, Launch, Sizes
from lib.fast.parts import grouped, loss_hopper, mlp, one_row_hopper

B16, F32, I32, I64, U8 = "bf16", "fp32", "i32", "i64", "u8"


def machine_code(launch: Launch, dtypes: list[str]) -> str:
    """What the assembler makes of a launch for tensors of these dtypes."""
    kernel: Any = launch.kernel
    signature, constants, hints = {}, {}, {}
    for i, (param, arg) in enumerate(zip(kernel.params, launch.args, strict=True)):
        if param.is_constexpr:
            signature[param.name], constants[(i,)] = "constexpr", arg
        elif isinstance(arg, Box):
            signature[param.name] = f"tensordesc<{dtypes[arg.tensor]}{list(arg.box)},{arg.layout!r}>"
        elif isinstance(arg, Address):
            signature[param.name] = f"*{dtypes[arg.tensor]}"
        else:
            signature[param.name] = F32 if isinstance(arg, float) else I32
        whole = isinstance(arg, Address) or (isinstance(arg, int) and arg % 16 == 0 and not param.do_not_specialize)
        if whole and not param.is_constexpr:
            hints[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, hints)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=launch.options).asm["sass"]


def launches() -> Iterator[tuple[str, Launch, list[str]]]:
    """One of each kernel by name, with the dtypes of its tensors."""
    make = {"forward": launch_forward, "dQ": launch_dq, "dK/dV": launch_dkdv}
    dtypes = {"forward": [B16] * 4 + [F32], "dQ": [B16] * 6 + [F32] * 2, "dK/dV": [B16] * 6 + [F32]}
    for width, length, kernels in ((64, 1024, ("forward", "dK/dV")), (64, 1000, ("forward",)), (128, 1024, ("dQ",))):
        for kernel, cut in zip(make, ROLES_TABLE[width, True], strict=True):
            if isinstance(cut, Roles) and kernel in kernels:
                launch = make[kernel](Sizes(1, 16, 1, length, length, width, True), cut)
                yield f"{kernel}, {width}, {length}", launch, dtypes[kernel]
    for causal in (True, False):
        sizes, apart = Sizes(1, 8, 1, 4096, 4096, 128, causal), 4 if causal else 1
        dealt = for_device(deal(sizes, 132, 2**17), apart, torch.device("cpu"))
        launch = backward_launch(sizes._replace(group=apart), dealt)
        yield f"stored, {'causal' if causal else 'full'}", launch, [B16] * 7 + [F32, B16, I32, I32]
    for length in (4096, 3000):
        launch = hopper_wide(Sizes(1, 16, 2, length, length, 256, True), ROLES)
        yield f"wide, {length}", launch, [B16] * 6 + [F32]
    for transposed in (False, True):
        launch = grouped._rows_launch((1024, 4096, 64, 132, grouped.Cut(transposed=transposed)))
        yield f"rows, {'transposed' if transposed else 'plain'}", launch, [B16] * 3 + [I32]
    yield "matrices", grouped._matrices_launch((1024, 4096, 8, 132, grouped.Cut())), [B16] * 3 + [I32]
    for form in ("none", "tanh"):
        launch = mlp._forward_launch((4096, 768, 3072, form == "tanh", 132))
        yield f"GELU, {form}", launch, [B16, B16, F32, B16, B16]
    yield "slope", mlp._backward_launch((4096, 768, 3072, 132)), [B16] * 4 + [F32]
    yield from products_of_levels()
    yield "loss", loss_hopper._powers_launch((16384, 768, 50304, 50257, 132)), [B16, B16, F32, I64, B16, F32]


def products_of_levels() -> Iterator[tuple[str, Launch, list[str]]]:
    """Of one row with a weight of levels."""
    for gated in (False, True):
        args = *map(Address, range(6)), 4096, 32, 1e-5, gated, gated, not gated, 4
        options = {"num_warps": one_row_hopper.WARPS, "maxnreg": one_row_hopper.REGISTERS}
        launch = Launch(one_row_hopper.one_row_of_levels_kernel, (1,), args, **options)
        yield f"levels, {'gated' if gated else 'added'}", launch, [B16, U8, F32, U8, B16, B16]


def main() -> None:
    assert not torch.cuda.is_initialized()
    found: dict[str, dict[str, int]] = {}
    for name, launch, dtypes in launches():
        if "--all" not in sys.argv and name.split(",")[0] in {other.split(",")[0] for other in found}:
            continue
        text = machine_code(launch, dtypes)
        found[name] = {
            word: text.count(word) for word in ("HMMA", "HGMMA", "WARPGROUP.ARRIVE", "LDL", "STS ", "USETMAXREG")
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
