"""Figures as SVG inside a page: sharp at every width, in the colours of the page's CSS."""

import io
import re
from html import escape

from matplotlib.figure import Figure

from ds_moe_lb.report.style import css_colours


def inline_svg(figure: Figure, *, alt: str, identity: str) -> str:
    """The figure as an `<svg>` element; draw it with the palette `style.CSS`.

    Args:
        figure: what to show.
        alt: for those who do not see it.
        identity: distinct for each figure of the page; its ids begin with it.
    """
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", dpi=110, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    # HTML knows these names by itself; a page without an address loads nothing for sure.
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{identity}-", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    for size in ("width", "height"):  # come from the page
        svg = re.sub(rf'^<svg([^>]*?) {size}="[^"]*"', r"<svg\1", svg)
    return css_colours(svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1))
