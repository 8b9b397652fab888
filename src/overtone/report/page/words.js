// Numbers as text, in the same words as the table in the terminal (overtone/report/table.py).

const NONE = "–";

const digits = (value, count = 3) => String(Number(value.toPrecision(count)));

function scaled(value, units) {
  for (const unit of units.slice(0, -1)) {
    if (value < 999.5) return `${digits(value)} ${unit}`;
    value /= 1000;
  }
  return `${digits(value)} ${units.at(-1)}`;
}

const humanBytes = (count) => scaled(count, ["B", "kB", "MB", "GB", "TB"]);

const CLOCK = [
  { name: "seconds", short: "s", size: 1 },
  { name: "minutes", short: "min", size: 60 },
  { name: "hours", short: "h", size: 3600 },
  { name: "days", short: "days", size: 86400 },
];

// The largest unit of which there are at least two.
const clockUnit = (seconds) => CLOCK.findLast((unit) => seconds >= 2 * unit.size) ?? CLOCK[0];

function humanSeconds(seconds) {
  const unit = clockUnit(seconds);
  return `${digits(seconds / unit.size)} ${unit.short}`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

const whole = (value) => value.toLocaleString("en-GB");

const percent = (share, places = 0) => `${(100 * share).toFixed(places).replace(/^-(0(\.0+)?)$/, "$1")}%`;

const signedPercent = (share) => (share > 0 ? "+" : "") + percent(share, 1);

const fixed = (value, places = 3) => (Math.abs(value) >= 1e5 ? value.toExponential(2) : value.toFixed(places));

const maybe = (value, write) => (value == null ? NONE : write(value));

const times = (value) => (value < 999.5 ? digits(value) : whole(Math.round(value)));

// As ratio in overtone/report/table.py. For a row that sends nothing the ratio is infinite, which JSON cannot express.
function fewer(ratio, nothing) {
  if (nothing) return "nothing";
  if (ratio == null) return "";
  if (Math.round(1000 * ratio) === 1000) return "1x";
  return ratio > 1 ? `${times(ratio)}x fewer` : `${times(1 / ratio)}x more`;
}

// For charts: the method and the last of its numbers tell lines apart; the list and the tooltip have the whole name.
function shortened(label, most = 28) {
  if (label.length <= most) return label;
  const [method, ...parts] = label.split(", ");
  while (parts.length && `${method}, … ${parts.join(", ")}`.length > most) parts.shift();
  return parts.length ? `${method}, … ${parts.join(", ")}` : `${label.slice(0, most - 1)}…`;
}

const readable = (name) => name.replaceAll("_", " ");
