// Draws the charts of the page with plotly. The charts have colours for light pages. On dark screens,
// dark colours replace them; before printing, the light colours return. plotly is loaded from memory,
// because the content security policy of the page blocks every request.
(async () => {
'use strict';
const DARK = JSON.parse(document.getElementById('dark-colours').textContent);
const plots = [...document.querySelectorAll('.pp-plot')];
const figures = JSON.parse(document.getElementById('figures').textContent);
const NARROW = 480, LEGEND_ROW = 17;
const heights = new Map(plots.map((plot) => [plot, plot.clientHeight]));
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
// On a narrow screen, the legend has few entries in a row, so the chart becomes higher by the legend.
const withRoomForLegend = (layout, data, plot) => {
  if (!layout.showlegend || plot.clientWidth >= NARROW) return layout;
  plot.style.height = heights.get(plot) + LEGEND_ROW * Math.ceil(data.length / 2) + 'px';
  return {...layout, legend: {...layout.legend, maxheight: 0.9, font: {size: 10}}};
};
const draw = async (dark) => {
  for (const [number, plot] of plots.entries()) {
    const {data, layout: wide} = themed(figures[number], dark);
    const layout = withRoomForLegend(wide, data, plot);
    await Plotly.react(plot, data, layout, {
      responsive: true, displaylogo: false, showTips: false,
      displayModeBar: hovers ? 'hover' : false,
      modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d'],
    });
    // Let the browser show and scroll the page between two charts.
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
    plot.classList.add('pp-undrawn');
    plot.textContent = 'This browser cannot draw the chart (' + error.message + ').';
  }
}
})();
