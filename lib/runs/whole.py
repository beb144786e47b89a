"""From an empty folder to a model that answers: every program of this package, one after the other.

python -m lib.runs.whole --size tiny --out way                       # some minutes on two cores
python -m lib.runs.whole --size small --out way --dry-run            # the commands, what they need, the predictions
python -m lib.runs.whole --size tiny --out way --use corpus=my_corpus

The stations are corpus (with its tokenizer), pretrain, tune, reward and export. Each is a folder in FOLDER, and is made
by the commands that are shown; after pretrain, tune and reward the model is asked what it can do. The predictions are
in FOLDER/predictions.json before anything runs: write your own there first, or accept those of the book.

A run that was killed, anywhere, goes on with the same command. At the end FOLDER has report.md and report.json.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lib.runs.engine.signals import STATUS
from lib.runs.flags import Parser, UsageError, positive, whole
from lib.runs.lock import closing_lock
from lib.runs.stations import plan
from lib.runs.stations.estimate import estimates
from lib.runs.stations.ledger import Ledger, explained, run_child
from lib.runs.stations.report import judged, keep_predictions, results_of, told, write_report

PROGRAM = "python -m lib.runs.whole"
MOST_GPUS = 4
REPLACED = plan.STATIONS[:-1]


def make_parser() -> Parser:
    """All flags of this program."""
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", required=True, choices=tuple(plan.SIZES), help="small needs a GPU")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="gets everything")
    parser.add_argument("--use", type=replacement, action="append", default=[], metavar="STATION=FOLDER",
                        help=f"a folder of your own in place of a station ({', '.join(REPLACED)}); those before it are "
                        "left out. May be given again for another station")  # fmt: skip
    parser.add_argument("--gpus", type=whole(1, MOST_GPUS), help=f"to train on; default: all, {MOST_GPUS} at most")
    parser.add_argument("--threads", type=whole(1, 1024), help="of PyTorch on a CPU; default: 2, or the CPU's cores")
    parser.add_argument("--price", type=positive, help="dollars that the machine costs an hour, for the report")
    parser.add_argument("--dry-run", action="store_true", help="show the plan, and write nothing")
    return parser


def replacement(text: str) -> tuple[str, Path]:
    """For ``type=``: accepts STATION=FOLDER."""
    station, _, folder = text.partition("=")
    if station not in REPLACED or not folder:
        raise argparse.ArgumentTypeError(f"{text!r}: expected STATION=FOLDER, the station {', '.join(REPLACED)}")
    return station, Path(folder)


def make_way(o: argparse.Namespace) -> plan.Way:
    """The stations that were asked for.

    Raises:
        UsageError: a folder is missing, or the machine cannot run this size.
    """
    own = dict(o.use)
    plan.check_own(own)
    n_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if o.gpus and o.gpus > n_found and not o.dry_run:
        raise UsageError(f"--gpus {o.gpus}: this machine has {n_found} that PyTorch can use; expected at most so many")
    size = plan.SIZES[o.size]
    if size.needs_gpu and not n_found and not o.dry_run:
        raise UsageError(f"--size {o.size}: this machine has no GPU that PyTorch can use; expected tiny, or --dry-run")
    n_gpus = o.gpus or (min(n_found, MOST_GPUS) if size.needs_gpu else min(n_found, 1)) or int(size.needs_gpu)
    return plan.Way(size, o.out, own, n_gpus, o.threads or min(2, torch.get_num_threads()))


def describe(way: plan.Way, size: str) -> str:
    """The plan: commands, what they need as far as the book can say, and predictions."""
    lines = []
    for station in way.stations:
        lines += [f"{station}", *(f"  {shlex.join(command)}" for command in way.commands(station))]
    lines += ["", "what the book's records say of it", *(f"  {line}" for line in estimates(way, size))]
    return "\n".join([*lines, "", "predictions", *(f"  {told(p)}" for p in way.size.predictions)])


def conduct(way: plan.Way, o: argparse.Namespace, launch: Callable[[list[str]], int]) -> int:
    """Run what is left of the stations, and write the report.

    Args:
        way: The stations.
        o: The flags.
        launch: Runs a command and returns its exit status.
    """
    request = {"--size": o.size, "--use": {name: str(path) for name, path in sorted(way.own.items())}}
    ledger, predictions = Ledger(way.folder, request), keep_predictions(way)
    ledger.save()
    say("predictions, in predictions.json:", *(f"  {told(p)}" for p in predictions))
    for n, station in enumerate(way.stations, 1):
        head = f"[{n}/{len(way.stations)}] {station}"
        status = run_station(way, station, ledger, head, launch)
        if status:
            say(explained(status, station))
            return status if status in (2, STATUS) else 1
    stations = {name: results_of(way, ledger.of(name), name, o.price) for name in way.stations}
    report = {"size": o.size, "task": way.size.task, "device": device_name(way), "gpus": way.n_gpus,
              "stations": stations, "predictions": judged(predictions, stations, way.size.task),
              "serve": way.serve()}  # fmt: skip
    print(write_report(way, report))
    print(f"\n{way.folder / 'report.md'} has all of it. Now ask the model yourself:\n\n  {shlex.join(way.serve())}")
    return 0


def run_station(way: plan.Way, station: str, ledger: Ledger, head: str, launch: Callable[[list[str]], int]) -> int:
    """Run the commands of a station that are not done yet; returns the status of the first one that fails, or 0."""
    entry, commands = ledger.of(station), way.commands(station)
    n_parts = len(commands) + (station == "export")
    if entry["done"] >= n_parts:
        say(f"{head}: done before")
        return 0
    with ledger.clock(station):
        plan.prepare(way, station)
        for i, command in enumerate(commands[entry["done"] :], entry["done"]):
            say(f"{head}: {shlex.join(command)}")
            status = launch(plan.executable(command))
            if status:
                return status
            entry["done"] = i + 1
            ledger.save()
        if station == "export":
            say(f"{head}: copy the model from {way.at('reward')} to {way.at('export')}")
            export(way.at("reward"), way.at("export"))
            entry["done"] = n_parts
    return 0


def export(source: Path, folder: Path) -> None:
    """Copy what a served folder consists of, without checkpoints and logs; the weights last."""
    folder.mkdir(exist_ok=True)
    for name in reversed(plan.FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / f".{name}.part")
            (folder / f".{name}.part").replace(folder / name)


def device_name(way: plan.Way) -> str:
    return torch.cuda.get_device_name(0) if way.n_gpus else f"CPU, {way.threads} threads"


def say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None, launch: Callable[[list[str]], int] = run_child) -> int:
    """Returns the exit status: 0, or 75 if asked to leave before the end, or 2 after one line about what is wrong
    with the request, or 130 after Ctrl-C, or 1 if a program failed otherwise.
    """
    try:
        o = make_parser().parse_args(argv)
        way = make_way(o)
        if o.dry_run:
            print(describe(way, o.size))
            return 0
        try:
            o.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {o.out}: {error.strerror}; expected a folder that can be written to") from None
        with closing_lock(o.out):
            return conduct(way, o, launch)
    except UsageError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say(f"{PROGRAM}: interrupted; the same command goes on")
        return 130


if __name__ == "__main__":
    sys.exit(main())
