const { names, items } = data;
const at = (id) => document.getElementById(id);
const CHUNK = 60; // cards that are made at a time: a page of thousands must open at once

// ------------------------------------------------------------------------------------------------------ cards

function picture(source, label, kind = "") {
  const frame = make("span", { className: "frame" });
  if (source) {
    frame.append(make("img", { src: source, alt: "", decoding: "async", className: data.tiny ? "tiny" : "" }));
  }
  return make("figure", { className: kind }, frame, ...(label ? [make("figcaption", {}, label)] : []));
}

function pair(of) {
  if (of.plain === undefined) return make("div", { className: "pair" }, picture(of.image));
  return make("div", { className: "pair" }, picture(of.plain, "plain", "was"), picture(of.image, "searched"));
}

/** What the search added to the plain image's score, or null. */
function gain(of, k) {
  const [before, after] = [of.before?.[k] ?? null, of.scores?.[k] ?? null];
  return before === null || after === null ? null : after - before;
}

function chip(of, name, k) {
  const said = make("span", {}, `${name} `, make("b", {}, shown(of.scores[k])));
  const more = gain(of, k);
  if (more !== null && Math.abs(more) >= 0.0005) {
    const sign = more > 0 ? "+" : "−";
    said.append(" ", make("span", { className: more > 0 ? "up" : "down" }, sign + shown(Math.abs(more))));
  }
  return said;
}

function card(of) {
  const button = make("button", { type: "button", className: "card" });
  button.append(of.error ? make("span", { className: "why bad" }, of.error) : pair(of));
  button.append(make("span", { className: "said" }, of.prompt));
  const chips = of.scores ? names.map((name, k) => chip(of, name, k)) : [];
  if (of.category) chips.push(make("span", {}, of.category));
  button.append(make("span", { className: "chips" }, ...chips));
  button.addEventListener("click", () => show(of));
  return make("li", {}, button);
}

let found = [];
let filled = 0;

function fillCards() {
  const next = found.slice(filled, filled + CHUNK);
  filled += next.length;
  at("cards").append(...next.map(card));
}

// -------------------------------------------------------------------------------------------- sort and filter

const VALUES = {
  order: (of) => of.order,
  score: (of, k) => of.scores?.[k] ?? null,
  gain,
  nfe: (of) => of.nfe ?? null,
  seconds: (of) => of.seconds ?? null,
};

function fits(of, words, kind) {
  if (kind === "!" && !of.error) return false;
  if (kind.startsWith("=") && of.category !== kind.slice(1)) return false;
  return words.every((word) => of.prompt.toLowerCase().includes(word));
}

function choose() {
  const words = at("text").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [what, k] = at("by").value.split(":");
  const sign = at("down").textContent === "↓" ? -1 : 1;
  found = items.filter((of) => fits(of, words, at("kind")?.value ?? ""));
  found.sort((a, b) => {
    const [u, v] = [VALUES[what](a, k), VALUES[what](b, k)];
    if (u === null || v === null) return (u === null) - (v === null); // what has no score comes last either way
    return sign * (u - v) || a.order - b.order;
  });
  at("count").textContent = found.length === items.length ? `${items.length}` : `${found.length} of ${items.length}`;
  at("cards").replaceChildren();
  filled = 0;
  fillCards();
}

at("text").addEventListener("input", choose);
at("kind")?.addEventListener("change", choose);
at("by").addEventListener("change", () => {
  at("down").textContent = at("by").value === "order:0" ? "↑" : "↓";
  choose();
});
at("down").addEventListener("click", () => {
  at("down").textContent = at("down").textContent === "↓" ? "↑" : "↓";
  choose();
});
at("beside")?.addEventListener("change", ({ target }) => at("cards").classList.toggle("alone", !target.checked));
new IntersectionObserver((seen) => { if (seen.some((of) => of.isIntersecting)) fillCards(); }, { rootMargin: "900px" })
  .observe(at("more"));

// ------------------------------------------------------------------------------------------------------ plots

const WIDE = Math.max(300, Math.min(560, innerWidth - 60)); // or the letters would shrink on a phone
const [HIGH, LEFT, RIGHT, TOP, BOTTOM] = [230, 54, 54, 10, 36];

function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The lowest and highest of some values with room around them, or noise would look like progress. */
function extent(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const room = Math.max(0.12 * (high - low), 0.005 * Math.max(Math.abs(low), Math.abs(high)), 0.002);
  return [low - room, high + room];
}

/** The best so far against NFE: the steering score on the left axis, held-out ones dashed on the right. */
function plot(nfe, curves, plain) {
  const last = Math.max(...nfe, 1);
  const x = (value) => LEFT + (WIDE - LEFT - RIGHT) * value / last;
  const sides = [extent([...curves[0], plain]), extent(curves.slice(1).flat())];
  const y = (value, side) => TOP + (HIGH - TOP - BOTTOM) * (sides[side][1] - value) / (sides[side][1] - sides[side][0]);
  const label = { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": "Best score against model evaluations" };
  const svg = draw("svg", label);
  sides.forEach((range, side) => {
    for (let k = 0; range && k < 4; k++) {
      const value = range[0] + (range[1] - range[0]) * (k + 0.5) / 4;
      const [end, anchor] = side ? [WIDE - RIGHT + 7, "start"] : [LEFT - 7, "end"];
      if (!side) svg.append(draw("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y(value, 0), y2: y(value, 0) }));
      svg.append(draw("text", { x: end, y: y(value, side) + 4, "text-anchor": anchor }, shown(value)));
    }
  });
  for (let k = 0; k <= 4; k++) {
    const value = Math.round(last * k / 4);
    svg.append(draw("text", { x: x(value), y: HIGH - BOTTOM + 16, "text-anchor": "middle" }, value));
  }
  svg.append(draw("text", { x: WIDE / 2, y: HIGH - 4, "text-anchor": "middle" }, "model evaluations (NFE)"));
  if (sides[0] && typeof plain === "number") {
    svg.append(draw("path", { class: "plain", d: `M${LEFT} ${y(plain, 0)}H${WIDE - RIGHT}` }));
  }
  curves.forEach((values, k) => {
    const path = steps(nfe, values, x, (value) => y(value, Math.min(k, 1)));
    svg.append(draw("path", { class: `curve${k % 4}${k ? " held" : ""}`, d: path && `${path}H${x(last)}` }));
    if (nfe.length <= 24) {
      const dots = values.map((value, i) => [x(nfe[i]), value]).filter(([, value]) => value !== null);
      const dot = ([cx, value]) => draw("circle", { class: `dot${k % 4}`, cx, cy: y(value, Math.min(k, 1)), r: 3 });
      svg.append(...dots.map(dot));
    }
  });
  return svg;
}

/** A path that holds each value until the next: the best so far stays the best. */
function steps(nfe, values, x, y) {
  let path = "";
  values.forEach((value, i) => {
    if (value !== null) path += path ? `H${x(nfe[i])}V${y(value)}` : `M${x(nfe[i])} ${y(value)}`;
  });
  return path;
}

function legend(labels, plain) {
  const lines = labels.map((name, k) => make("span", {}, make("i", { className: `curve${k % 4}${k ? " held" : ""}` }),
    `${name} ${k ? "(held out, right)" : "(steers)"}`));
  if (typeof plain === "number") lines.push(make("span", {}, make("i", { className: "plain" }), `plain ${labels[0]}`));
  return make("div", { className: "legend" }, ...lines);
}

// ----------------------------------------------------------------------------------------------------- dialog

let open = null;

const fill = browse((key) => {
  const next = found[found.indexOf(open) + (key === "ArrowLeft" || key === "ArrowUp" ? -1 : 1)];
  if (next) show(next);
});

function scores(of) {
  const head = ["", ...(of.before ? ["plain"] : []), "searched"];
  const rows = names.map((name, k) => [name, ...(of.before ? [shown(of.before[k])] : []), shown(of.scores[k])]);
  return make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((text) => make("td", {}, text))))));
}

function show(of) {
  open = of;
  const left = make("div");
  const right = make("div", {}, make("h2", {}, of.prompt));
  if (of.error) right.append(make("p", { className: "bad" }, of.error));
  else left.append(pair(of));
  if (of.trace) left.append(plot(of.trace[0], of.trace.slice(1), of.before?.[0]), legend(names, of.before?.[0]));
  if (of.scores) right.append(scores(of));
  right.append(definitions(of.facts));
  right.append(...(of.events ?? []).map((event) => make("p", { className: "note" }, event)));
  if (of.command) right.append(make("pre", {}, of.command));
  const texts = { seed: of.seed, command: of.command, prompt: of.prompt };
  const buttons = Object.entries(texts).filter(([, text]) => text).map(([what, text]) => copier(`Copy ${what}`, text));
  if (of.file) buttons.push(make("a", { href: of.file, target: "_blank" }, "Open the file"));
  fill(left, right, buttons);
}

if (data.curve) at("curve").append(plot(data.curve[0], data.curve.slice(1)), legend(names));
choose();
