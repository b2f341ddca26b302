"""plotly's JavaScript as it travels in a page, and the script of the page that draws with it.

plotly is one file that needs nothing else: Bokeh needs NumPy and tornado to make a figure, and
Vega's JavaScript comes in packages of 33 MB. The file is read where the package lies; plotly itself
is never imported. Nothing here makes figures.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from poprun_py.past_runs.pages.colours import DARK

_FILE: Final = "package_data/plotly.min.js"
# Little larger than at the usual level, in half the time: a job waits for its page.
_LEVEL: Final = 4


@cache
def packed_plotly() -> str:
    """Return plotly's JavaScript, compressed and in base64; empty if it is not installed."""
    import base64
    import gzip

    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(spec.submodule_search_locations[0], _FILE)
    try:
        code = file.read_bytes()
    except OSError:
        return ""
    return base64.b64encode(gzip.compress(code, _LEVEL, mtime=0)).decode("ascii")


# Figures have the colours of a light page. They are drawn again when the scheme changes, and light
# for paper. plotly is loaded from memory as a script of its own, which the page's policy allows to
# this script alone.
DRAWING: Final = (
    "(async () => {\n'use strict';\nconst DARK = "
    + json.dumps(DARK)
    + """;
const plots = [...document.querySelectorAll('.plot')];
const figures = JSON.parse(document.getElementById('figures').textContent);
const hovers = matchMedia('(hover: hover)').matches;
const scheme = matchMedia('(prefers-color-scheme: dark)');
const themed = (value, dark) => {
  if (typeof value === 'string') return dark ? DARK[value] ?? value : value;
  if (Array.isArray(value)) return value.map((each) => themed(each, dark));
  if (value === null || typeof value !== 'object') return value;
  const made = {};
  for (const [key, each] of Object.entries(value)) made[key] = themed(each, dark);
  return made;
};
const unpacked = async () => {
  const packed = atob(document.getElementById('plotly').textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Blob([await new Response(stream).arrayBuffer()], {type: 'text/javascript'});
};
const loaded = (blob) => new Promise((done, failed) => {
  const script = document.createElement('script');
  script.src = URL.createObjectURL(blob);
  script.onload = () => { URL.revokeObjectURL(script.src); done(); };
  script.onerror = () => failed(new Error('plotly did not load'));
  document.head.append(script);
});
const draw = async (dark) => {
  for (const [number, plot] of plots.entries()) {
    const {data, layout} = themed(figures[number], dark);
    await Plotly.react(plot, data, layout, {
      responsive: true, displaylogo: false, showTips: false,
      displayModeBar: hovers ? 'hover' : false,
      modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d'],
    });
    // Let the page be shown and scrolled between two charts.
    await new Promise((next) => setTimeout(next));
  }
};
try {
  await loaded(await unpacked());
  await draw(scheme.matches);
  document.documentElement.dataset.drawn = plots.length;
  scheme.addEventListener('change', () => draw(scheme.matches));
  addEventListener('beforeprint', () => draw(false));
  addEventListener('afterprint', () => draw(scheme.matches));
} catch (error) {
  for (const plot of plots) {
    plot.classList.add('undrawn');
    plot.textContent = 'This browser cannot draw the chart (' + error.message + ').';
  }
}
})();
"""
)


def drawing_hash() -> str:
    """Return by what a page's policy knows the script: nothing else in the page runs."""
    # Most pages are of short jobs, which have no charts.
    import base64
    import hashlib

    return base64.b64encode(hashlib.sha256(DRAWING.encode()).digest()).decode()
