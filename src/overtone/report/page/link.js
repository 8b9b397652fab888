// The time that the same run would take on another link.

const PRESETS = [
  { text: "1 Gbit/s, 1 ms", bandwidth: 1000, latency: 1 },
  { text: "50 Mbit/s, 20 ms", bandwidth: 50, latency: 20 },
  { text: "5 Mbit/s, 80 ms", bandwidth: 5, latency: 80 },
];

const USUAL = { bandwidth: 50, latency: 20, step_seconds: 0.1 }; // as overtone.config.Network

const linkOf = (given) => Object.fromEntries(Object.entries(USUAL).map(([name, usual]) => [name, given?.[name] ?? usual]));

// As Link.seconds in overtone/sim/network.py; a link here is in Mbit/s and ms.
const exchangeSeconds = ({ bytes, received, hops }, link) => (hops * link.latency) / 1e3 + (8 * Math.max(bytes, received)) / (link.bandwidth * 1e6);

// As overtone/report/link_time.py: exchanges that go on beside the training cost what local steps do not hide.
function linkSeconds(point, link) {
  if (point.seeds) return mean(point.seeds.map((seed) => linkSeconds(seed, link)));
  const rest = { bytes: point.bytes, received: point.received, hops: point.hops };
  let waited = 0;
  for (const [steps, bytes, received, hops] of point.overlapped ?? []) {
    waited += Math.max(0, exchangeSeconds({ bytes, received, hops }, link) - steps * link.step_seconds);
    rest.bytes -= bytes;
    rest.received -= received;
    rest.hops -= hops;
  }
  return point.step * link.step_seconds + waited + exchangeSeconds(rest, link);
}

const linkWords = (link) =>
  `${link.bandwidth < 1000 ? `${digits(link.bandwidth)} Mbit/s` : `${digits(link.bandwidth / 1000)} Gbit/s`}, ${digits(link.latency)} ms`;

// Shows `link` in the form and writes what the reader types back into it.
class LinkControl {
  constructor(form, changed) {
    this.fields = { bandwidth: byId("bandwidth"), latency: byId("latency"), step_seconds: byId("step-seconds") };
    this.changed = changed;
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const [name, field] of Object.entries(this.fields)) {
      field.addEventListener("input", () => {
        const valid = field.value !== "" && field.checkValidity();
        field.setAttribute("aria-invalid", String(!valid));
        if (valid) this.take({ [name]: field.valueAsNumber });
      });
    }
    this.buttons = PRESETS.map((preset) => {
      const choose = () => (this.take({ bandwidth: preset.bandwidth, latency: preset.latency }), this.show(this.link));
      return el("button", { type: "button", class: "quiet", onclick: choose }, preset.text);
    });
    byId("presets").append(...this.buttons);
  }

  show(link) {
    this.link = link;
    for (const [name, field] of Object.entries(this.fields)) {
      field.value = link[name];
      field.setAttribute("aria-invalid", "false");
    }
    this.mark();
  }

  take(values) {
    Object.assign(this.link, values);
    this.mark();
    this.changed();
  }

  mark() {
    PRESETS.forEach((preset, i) => {
      const same = preset.bandwidth === this.link.bandwidth && preset.latency === this.link.latency;
      this.buttons[i].setAttribute("aria-pressed", String(same));
    });
  }
}
