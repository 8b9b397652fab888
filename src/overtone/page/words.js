// Numbers as people read them; the same words as overtone.words and the table in the terminal.

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

const whole = (value) => value.toLocaleString("en-GB");

const percent = (share, places = 0) => `${(100 * share).toFixed(places).replace(/^-(0(\.0+)?)$/, "$1")}%`;

const signedPercent = (share) => (share > 0 ? "+" : "") + percent(share, 1);

const fixed = (value, places = 3) => (Math.abs(value) >= 1e5 ? value.toExponential(2) : value.toFixed(places));

const maybe = (value, write) => (value == null ? NONE : write(value));

function fewer(ratio, bytes) {
  if (bytes === 0) return "nothing";
  if (ratio == null) return NONE;
  if (digits(ratio) === "1") return "1x";
  return ratio > 1 ? `${digits(ratio)}x fewer` : `${digits(1 / ratio)}x more`;
}

const readable = (name) => name.replaceAll("_", " ");
