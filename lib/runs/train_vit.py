"""Train a vision transformer, from digits on a laptop to G/14 on many GPUs.

python -m lib.runs.train_vit
torchrun --nproc-per-node 4 -m lib.runs.train_vit --model L/16 --strategy ddp --precision bf16 --compile --batch 1024
torchrun --nproc-per-node 8 -m lib.runs.train_vit --model G/14 --strategy fsdp --engine torch --precision bf16 --compile
mpiexec -n 2 python -m lib.runs.train_vit --strategy tp
"""

import sys

from lib.given.models.vit import PRESETS
from lib.runs.engine.arguments import add_size_flags, make_parser
from lib.runs.engine.start import main as run
from lib.runs.engine.tasks import ViTTask
from lib.runs.flags import Parser, whole


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 75 if asked to leave before the last step,
    or 2 after one line about what is wrong with the request.
    """
    return run(make_vit_parser(), ViTTask, argv)


def make_vit_parser() -> Parser:
    """All flags of this program."""
    models = ["tiny", *(name for name in PRESETS if name != "tiny")]
    parser = make_parser("lib.runs.train_vit", models, "images", "Train a vision transformer.")
    pictures = parser.add_argument_group("pictures")
    pictures.add_argument(
        "--image-size", type=whole(1), help="side of the model's square input, in pixels; default: the preset's"
    )
    pictures.add_argument("--classes", type=whole(1), help="number of classes of the head; default: the data's")
    add_size_flags(parser).add_argument(
        "--patch-size",
        type=whole(1),
        help="side of a patch, in pixels, which divides the input's; default: the preset's",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
