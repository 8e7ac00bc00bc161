"""How figures look: on paper, on dark paper, and inside a page whose CSS decides the colours."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
from matplotlib.colors import Colormap, LinearSegmentedColormap

# Okabe-Ito, distinguishable with colour-blind eyes; its blue is too dark for dark paper.
_RUNS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_RUNS_ON_DARK = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#F0E442")


@dataclass(frozen=True, kw_only=True)
class Palette:
    """Colours of a figure.

    Attributes:
        paper: behind everything.
        ink: text and marks.
        faint: lines that guide the eye.
        runs: one colour per run, used in turn.
    """

    paper: str
    ink: str
    faint: str
    runs: tuple[str, ...]


LIGHT = Palette(paper="#ffffff", ink="#1f2328", faint="#d9dde2", runs=_RUNS)
DARK = Palette(paper="#161b22", ink="#e6edf3", faint="#3b434d", runs=_RUNS_ON_DARK)
# Colours that occur nowhere else, each replaced by a CSS variable in the finished SVG.
CSS = Palette(
    paper="none",
    ink="#010203",
    faint="#020304",
    runs=tuple(f"#03040{number}" for number in range(len(_RUNS))),
)

# Load relative to the mean, in the middle even; grey rests on light and on dark paper alike.
LOAD_MAP: Colormap = LinearSegmentedColormap.from_list(
    "load", ["#56B4E9", "#3f7fa6", "#5b6470", "#a8772a", "#FFB000"]
)
DEAD_COLOUR = "#ff3b8d"


def css_variables(palette: Palette) -> str:
    """The CSS that gives the variables of figures the colours of `palette`."""
    runs = (f"--run-{number}: {colour}" for number, colour in enumerate(palette.runs))
    return "; ".join(
        [f"--figure-ink: {palette.ink}", f"--figure-faint: {palette.faint}", *runs, ""]
    )


def css_colours(text: str) -> str:
    """An SVG drawn with `CSS`, with variables in place of its colours."""
    text = text.replace(CSS.ink, "var(--figure-ink)").replace(CSS.faint, "var(--figure-faint)")
    for number, colour in enumerate(CSS.runs):
        text = text.replace(colour, f"var(--run-{number})")
    return text


@contextmanager
def styled(palette: Palette) -> Iterator[None]:
    """matplotlib's settings for all our figures."""
    settings = {
        "figure.facecolor": palette.paper,
        "savefig.facecolor": palette.paper,
        "axes.facecolor": palette.paper,
        "axes.edgecolor": palette.faint,
        "axes.labelcolor": palette.ink,
        "axes.titlecolor": palette.ink,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": palette.faint,
        "grid.linewidth": 0.6,
        "grid.alpha": 0.7,
        "text.color": palette.ink,
        "xtick.color": palette.ink,
        "ytick.color": palette.ink,
        "legend.frameon": False,
        "figure.constrained_layout.w_pad": 0.09,
        "figure.constrained_layout.h_pad": 0.09,
        "font.size": 9.5,
        "svg.fonttype": "none",
        "svg.hashsalt": "ds_moe_lb",
    }
    with matplotlib.rc_context(settings):  # type: ignore[arg-type]
        yield
