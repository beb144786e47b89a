"""Figures that one can play with, on the book's pages and in a notebook; ``player`` says how they are made."""

from lib.given.show.play.bands import bands
from lib.given.show.play.batching import batching
from lib.given.show.play.capacity import capacity
from lib.given.show.play.clocks import clocks
from lib.given.show.play.flash_tiles import tiles
from lib.given.show.play.intervals import intervals
from lib.given.show.play.isoflop import isoflop
from lib.given.show.play.pairs import pairs
from lib.given.show.play.planner import planner
from lib.given.show.play.ring import ring
from lib.given.show.play.scales import scales
from lib.given.show.play.schedules import schedules
from lib.given.show.play.spectrum import spectrum
from lib.given.show.play.state import state
from lib.given.show.play.windows import windows
from lib.given.show.play.zero import zero

__all__ = [
    "bands",
    "batching",
    "capacity",
    "clocks",
    "intervals",
    "isoflop",
    "pairs",
    "planner",
    "ring",
    "scales",
    "schedules",
    "spectrum",
    "state",
    "tiles",
    "windows",
    "zero",
]
