// Everything drawn goes through draw(): made once per canvas, then updated, so a new theme can redraw it all.

Chart.defaults.animation = false;
Chart.defaults.maintainAspectRatio = false;

const drawn = new Map(); // canvas: { chart, config }

function draw(canvas, config) {
  const { type, data, options, plugins } = config();
  const chart = drawn.get(canvas)?.chart;
  if (chart) Object.assign(chart, { data, options }).update();
  drawn.set(canvas, { config, chart: chart ?? new Chart(canvas, { type, data, options, plugins }) });
  return drawn.get(canvas).chart;
}

const redraw = () => drawn.forEach(({ config }, canvas) => draw(canvas, config));

function forget(canvas) {
  drawn.get(canvas)?.chart.destroy();
  drawn.delete(canvas);
}

function baseOptions() {
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  Chart.defaults.color = colour("--muted");
  return {
    interaction: { mode: "nearest", intersect: false },
    plugins: {
      legend: { display: false },
      tooltip: {
        backgroundColor: colour("--panel"), borderColor: colour("--line"), borderWidth: 1, padding: 10, caretPadding: 8,
        titleColor: colour("--ink"), bodyColor: colour("--ink"), displayColors: false,
      },
    },
  };
}

const scale = (title, more = {}) => ({
  title: { display: Boolean(title), text: title, color: colour("--muted") },
  grid: { color: colour("--grid"), tickColor: "transparent" },
  border: { color: colour("--line") },
  ticks: { color: colour("--muted"), maxRotation: 0, autoSkipPadding: 14 },
  ...more,
});

// Only powers of ten are written and ruled; with less than two of them in sight, 2 and 5 as well.
function logScale(title, write) {
  const steps = (axis) => (axis.max / axis.min < 100 ? [1, 2, 5] : [1]);
  const round = (axis, value) => steps(axis).includes(Number(value.toExponential(6).split("e")[0]));
  return scale(title, {
    type: "logarithmic",
    ticks: { color: colour("--muted"), maxRotation: 0, autoSkip: false, callback(value) { return round(this, value) ? write(value) : null; } },
    grid: { tickColor: "transparent", color: (context) => (context.tick && round(context.scale, context.tick.value) ? colour("--grid") : "transparent") },
  });
}

// For pictures that leave the page: a canvas is transparent otherwise.
const background = {
  id: "background",
  beforeDraw({ ctx, width, height }) {
    ctx.save();
    ctx.fillStyle = colour("--panel");
    ctx.fillRect(0, 0, width, height);
    ctx.restore();
  },
};

const AIR = { left: 0, top: 0, right: 8, bottom: 0 }; // a mark at the end of the axis is not cut in half
