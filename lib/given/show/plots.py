"""Figures that are legible on a light and on a dark page, with a description for those who cannot see them."""

import base64
import html
import io

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.figure import Figure

GREY = "#777777"
"""Text, axes and grid: contrast of 4.5 on white and of 4.7 on black."""

COLOURS = ("#1f7fc4", "#d55e00", "#009e73", "#b5589a", "#a67c00", "#7570d0")
"""After Okabe and Ito, darkened so that each has a contrast of 3 on white and on black."""

CSS_DPI = 100
"""One inch of a figure is this many pixels of the page; the file holds twice as many."""


def style() -> None:
    """Set matplotlib up: transparent background, mid-tone text, a cycle that colour-blind readers can tell apart."""
    mpl.rcParams.update(
        {
            "figure.figsize": (6.4, 3.6),
            "figure.dpi": CSS_DPI,
            "figure.facecolor": "none",
            "figure.edgecolor": "none",
            "figure.constrained_layout.use": True,
            "savefig.facecolor": "none",
            "savefig.edgecolor": "none",
            "savefig.transparent": True,
            "axes.facecolor": "none",
            "axes.edgecolor": GREY,
            "axes.labelcolor": GREY,
            "axes.titlecolor": GREY,
            "axes.titlesize": "medium",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=COLOURS),
            "grid.color": GREY,
            "grid.alpha": 0.25,
            "grid.linewidth": 0.6,
            "text.color": GREY,
            "xtick.color": GREY,
            "ytick.color": GREY,
            "legend.frameon": False,
            "legend.labelcolor": GREY,
            "lines.linewidth": 1.8,
            "image.cmap": "viridis",
            "font.size": 10.5,
        }
    )


def as_html(fig: Figure, alt: str) -> str:
    """An ``<img>`` that holds the figure itself, at twice the resolution of the page."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=2 * CSS_DPI, transparent=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    width = round(fig.get_figwidth() * CSS_DPI)
    look = f"width:{width}px;max-width:100%;height:auto;background:transparent"
    return f'<img class="workbook-figure" src="data:image/png;base64,{data}" alt="{html.escape(alt)}" style="{look}">'


def show(fig: Figure, alt: str) -> None:
    """Display a figure, 100 pixels an inch, with a description of what it shows, and close it.

    Args:
        fig: The figure.
        alt: What the figure shows, in a sentence, for a reader who cannot see it.
    """
    if not alt.strip():
        raise ValueError("show(fig, alt): alt must say what the figure shows")
    text = as_html(fig, alt)
    plt.close(fig)
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import HTML, display
    except ImportError:
        return
    if get_ipython() is not None:
        display(HTML(text))


style()
