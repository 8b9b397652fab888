// Elements are made here only. Text from the data goes in as text nodes, so nothing in it is ever markup.

const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

// Radio buttons that look like one segmented control: arrow keys and screen readers work without help.
function segments(fieldset, options, chosen, choose) {
  fieldset.replaceChildren(fieldset.querySelector("legend"));
  for (const [value, text] of options) {
    const input = el("input", { type: "radio", name: fieldset.id, value, onchange: () => choose(value) });
    input.checked = value === chosen;
    fieldset.append(el("label", {}, input, el("span", {}, text)));
  }
  fieldset.hidden = options.length < 2;
}

// A short line in the shape of the chart's own, for lists.
function swatch(style) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const set = (element, values) => Object.entries(values).forEach(([name, value]) => element.setAttribute(name, value));
  set(svg, { class: "swatch", width: 28, height: 8, "aria-hidden": "true" });
  set(line, { x1: 0, y1: 4, x2: 28, y2: 4, "stroke-width": 2.5, "stroke-dasharray": style.dash.join(" "), style: `stroke: ${style.css}` });
  svg.append(line);
  return svg;
}

// A command with a button that copies it; where the clipboard is closed, the text is selected instead.
function command(text) {
  const code = el("code", {}, text);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  const button = el("button", { type: "button", class: "quiet", onclick: copy }, "Copy");
  return el("div", { class: "command" }, el("pre", { tabindex: 0 }, code), button);
}

function download(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000); // not at once: the browser may not have begun to read it
}
