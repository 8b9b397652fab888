// Light and dark. All colours live in page.css and dark.css; canvases cannot read CSS variables, so they are resolved here.

const DASHES = [[], [8, 4], [2, 3], [10, 4, 2, 4]];
const OTHERS = 3; // --other-0 ... in page.css, for methods that have no colour of their own there

const PLAIN = { width: 2.2, order: 2 };
const EMPHASIS = { decoupled: { width: 3, order: 0 } }; // what the page is about is drawn last and strongest

const probe = document.body.appendChild(el("span", { hidden: true }));

const resolved = new Map(); // of the present theme: asking the browser each time makes it lay out the page anew

// The colour of a CSS variable in the present theme, as [red, green, blue]; null where there is no such variable.
function channels(variable) {
  if (!resolved.has(variable)) {
    probe.style.color = `var(${variable})`;
    const known = getComputedStyle(document.documentElement).getPropertyValue(variable);
    resolved.set(variable, known ? getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number) : null);
  }
  return resolved.get(variable);
}

const rgb = (values, alpha = 1) => `rgba(${values.map(Math.round).join(", ")}, ${alpha})`;

const colour = (variable, alpha) => rgb(channels(variable), alpha);

const mix = (from, to, share) => from.map((value, i) => value + share * (to[i] - value));

// Colour by method, dash and lightness by variant: a label looks the same in every group and every chart.
class Styles {
  constructor(groups) {
    this.seen = new Map(); // label: { method, variant }
    this.variants = new Map(); // method: how many labels
    const rows = groups.flatMap((group) => group.rows);
    const plain = rows.filter((row) => row.label === row.method); // first: a method without further words is its solid line
    for (const row of [...plain, ...rows]) this.note(row.label, row.method);
  }

  note(label, method) {
    if (this.seen.has(label)) return;
    const variant = this.variants.get(method) ?? 0;
    this.variants.set(method, variant + 1);
    this.seen.set(label, { method, variant });
  }

  of(label) {
    const { method, variant } = this.seen.get(label);
    const turn = Math.floor(variant / DASHES.length); // dashes come round again: then by lightness alone
    const lighter = Math.min(0.55, 0.1 * (variant % DASHES.length) + 0.25 * turn);
    const variable = this.variable(method);
    const values = mix(channels(variable), channels("--panel"), lighter);
    return {
      color: rgb(values), faint: rgb(values, 0.35), dash: DASHES[variant % DASHES.length],
      ...(EMPHASIS[method] ?? PLAIN),
      css: `color-mix(in srgb, var(--panel) ${100 * lighter}%, var(${variable}))`, // follows the theme by itself
    };
  }

  variable(method) {
    const own = (name) => `--method-${name.replace(/[^\w-]/g, "")}`;
    if (channels(own(method))) return own(method);
    const strangers = [...this.variants.keys()].filter((name) => !channels(own(name)));
    return `--other-${strangers.indexOf(method) % OTHERS}`;
  }
}

// localStorage may be absent or may throw on file://; then the choice lasts as long as the page.
function remembered(value) {
  try {
    if (value) localStorage.setItem("overtone-theme", value);
    return localStorage.getItem("overtone-theme");
  } catch {
    return null;
  }
}

function themeButton(button, redraw) {
  const sheet = byId("dark");
  const asSystem = sheet.media;
  const system = matchMedia(asSystem);
  const dark = () => matchMedia(sheet.media).matches;
  const use = (theme) => (sheet.media = { light: "not all", dark: "all" }[theme] ?? asSystem);
  const changed = () => {
    resolved.clear();
    redraw();
  };
  const show = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
    changed();
  };
  use(remembered());
  button.addEventListener("click", () => {
    const theme = dark() ? "light" : "dark";
    use(theme);
    remembered(theme);
    show();
  });
  system.addEventListener("change", show);
  // Paper is white whatever the screen is.
  let before;
  addEventListener("beforeprint", () => ((before = sheet.media), use("light"), changed()));
  addEventListener("afterprint", () => ((sheet.media = before), changed()));
  show();
}
