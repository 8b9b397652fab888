// The names of lines inside a chart: beside their ends where there is room, and in columns below a saved picture.

const NARROW = 560; // pixels; below, lines go unnamed in the chart
const LINE = 16; // pixels from one name to the next below it
const NAMED_FIRST = ["ddp", "decoupled", "published"]; // after the reference, when there is not room for all

function nameRank(row) {
  if (row.reference) return 0;
  const place = NAMED_FIRST.indexOf(row.method);
  return place < 0 ? NAMED_FIRST.length + 1 : place + 1;
}

const nameFont = () => `600 12px ${Chart.defaults.font.family}`;

const ruler = el("canvas").getContext("2d");

function textWidth(text, font) {
  ruler.font = font;
  return ruler.measureText(text).width;
}

// As much of a name as there is room for.
function fitted(label, room) {
  let most = 28;
  while (most > 4 && textWidth(shortened(label, most), nameFont()) > room) most -= 1;
  return shortened(label, most);
}

const touching = (a, b) => a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;

// Every few pixels along the drawn lines, as tiny boxes.
function traces(lines) {
  return lines.flatMap(({ meta }) => meta.data.slice(1).flatMap((to, i) => {
    const from = meta.data[i];
    const count = Math.ceil(Math.hypot(to.x - from.x, to.y - from.y) / 6);
    return Array.from({ length: Math.min(count, 500) }, (_, k) => ({ x: from.x + (k / count) * (to.x - from.x), y: from.y + (k / count) * (to.y - from.y), w: 1, h: 1 }));
  }));
}

// Ends that stand above each other: three or more within a few pixels.
function columnsOfEnds(ends) {
  const columns = [];
  for (const one of [...ends].sort((a, b) => a.end.x - b.end.x)) {
    const last = columns.at(-1);
    if (last && one.end.x - last.at(-1).end.x < 8) last.push(one);
    else columns.push([one]);
  }
  return columns.filter((column) => column.length > 2);
}

// The places nearest to the wanted ones (sorted) that are LINE apart: neighbours that collide share their displacement.
function spread(wanted, top, bottom) {
  const blocks = [];
  wanted.forEach((y, i) => {
    let block = { sum: y - i * LINE, count: 1 };
    while (blocks.length && blocks.at(-1).sum / blocks.at(-1).count > block.sum / block.count) {
      const above = blocks.pop();
      block = { sum: above.sum + block.sum, count: above.count + block.count };
    }
    blocks.push(block);
  });
  const last = wanted.length - 1;
  return blocks
    .flatMap(({ sum, count }) => Array(count).fill(sum / count))
    .map((y, i) => Math.max(top + i * LINE, Math.min(bottom - (last - i) * LINE, y + i * LINE)));
}

// Where each name goes: [{ dataset, end, text, box }]. `ends` come with the most important first.
function placed(ends, lines, { chartArea: area, width }) {
  const found = [];
  const points = ends.filter(({ dataset }) => !dataset.level);
  const taken = points.map(({ end }) => ({ x: end.x - 5, y: end.y - 5, w: 10, h: 10 }));
  const isFree = (box) => box.x >= area.left && box.x + box.w <= width - 2 && box.y >= area.top - LINE / 2 && !taken.some((other) => touching(box, other));
  const take = (one, text, box) => {
    taken.push(box);
    found.push({ ...one, text, box });
  };
  const stacked = new Set();
  for (const column of columnsOfEnds(points)) {
    const fit = Math.floor((area.bottom - area.top) / LINE);
    const named = points.filter((one) => column.includes(one)).slice(0, fit).sort((a, b) => a.end.y - b.end.y);
    const x = Math.max(...named.map(({ end }) => end.x)) + 24;
    const places = spread(named.map(({ end }) => end.y), area.top, area.bottom - LINE / 2);
    named.forEach((one, i) => {
      const text = fitted(one.dataset.label, width - 2 - x);
      const box = { x, y: places[i] - LINE / 2, w: textWidth(text, nameFont()), h: LINE };
      if (!isFree(box)) return; // then as those that stand alone
      take(one, text, box);
      stacked.add(one);
    });
  }
  const trace = traces(lines);
  for (const one of ends.filter((other) => !stacked.has(other))) {
    const { dataset, end } = one;
    const text = shortened(dataset.label);
    const w = textWidth(text, nameFont());
    const at = (x, y) => ({ x: end.x + x, y: end.y + y - LINE / 2, w, h: LINE });
    const beside = [0, -11, 11, -18, 18].map((y) => at(9, y));
    const around = [at(-w / 2, 17), at(-w / 2, -17), at(-w, 17), at(-w, -17), at(-w - 9, 0)];
    const level = [at(2, -10), at(2, 11)];
    const free = (dataset.level ? level : [...beside, ...around]).filter((box) => box.y < area.bottom - 14 && isFree(box));
    if (!free.length) continue;
    const crossed = free.map((box) => trace.filter((spot) => touching(box, spot)).length);
    take(one, text, free[crossed.indexOf(Math.min(...crossed))]);
  }
  return found;
}

// A picture should not need a legend to be read.
const endLabels = {
  id: "endLabels",
  afterDatasetsDraw(chart) {
    const { ctx, chartArea: area, width } = chart;
    const lines = chart.data.datasets
      .map((dataset, i) => ({ dataset, meta: chart.getDatasetMeta(i) }))
      .filter(({ dataset, meta }) => dataset.main && !dataset.hidden && meta.data.length && (dataset.level || width >= NARROW))
      .sort((a, b) => a.dataset.rank - b.dataset.rank);
    const ends = lines
      .map(({ dataset, meta }) => ({ dataset, end: dataset.level ? { x: Math.max(area.left, meta.data[0].x), y: meta.data[0].y } : meta.data.at(-1) }))
      .filter(({ end }) => end.y >= area.top - 1 && end.y <= area.bottom);
    ctx.save();
    ctx.font = nameFont();
    ctx.textBaseline = "middle";
    ctx.lineJoin = "round";
    chart.named = placed(ends, lines, chart);
    for (const { dataset, end, text, box } of chart.named) {
      const y = box.y + LINE / 2;
      if (box.x > end.x + 20) {
        ctx.lineWidth = 1;
        ctx.strokeStyle = dataset.borderColor;
        ctx.beginPath();
        ctx.moveTo(end.x + 6, end.y);
        ctx.lineTo(box.x - 4, y);
        ctx.stroke();
      }
      ctx.lineWidth = 4;
      ctx.strokeStyle = colour("--panel");
      ctx.strokeText(text, box.x, y);
      ctx.fillStyle = dataset.borderColor;
      ctx.fillText(text, box.x, y);
    }
    ctx.restore();
  },
};

const LEGEND = { line: 26, sample: 34, gap: 28, size: 14 }; // pixels

// Every name in full, in columns as wide as the longest: { height, plugin }. `room`: the picture without its margins.
function legendBelow(datasets, room, margin) {
  const entries = datasets.filter((dataset) => dataset.main && !dataset.hidden);
  const font = `${LEGEND.size}px ${Chart.defaults.font.family}`;
  const widest = Math.min(room, LEGEND.sample + 8 + Math.max(0, ...entries.map(({ label }) => textWidth(label, font))));
  const columns = Math.max(1, Math.floor((room + LEGEND.gap) / (widest + LEGEND.gap)));
  const rows = Math.ceil(entries.length / columns);
  const afterDraw = ({ ctx, height }) => {
    const top = height - margin - rows * LEGEND.line;
    ctx.save();
    Object.assign(ctx, { font, textBaseline: "middle", lineWidth: 2.5 });
    entries.forEach((dataset, i) => {
      const x = margin + Math.floor(i / rows) * (widest + LEGEND.gap);
      const y = top + ((i % rows) + 0.5) * LEGEND.line;
      ctx.setLineDash(dataset.borderDash);
      ctx.strokeStyle = dataset.borderColor;
      ctx.beginPath();
      ctx.moveTo(x, y);
      ctx.lineTo(x + LEGEND.sample, y);
      ctx.stroke();
      ctx.fillStyle = colour("--ink");
      ctx.fillText(dataset.label, x + LEGEND.sample + 8, y, widest - LEGEND.sample - 8);
    });
    ctx.restore();
  };
  return { height: rows * LEGEND.line, plugin: { id: "legendBelow", afterDraw } };
}
