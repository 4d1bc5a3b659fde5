const cells = [...document.querySelectorAll(".cell")];
let open = 0;

const fill = browse((key) => {
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -data.columns, ArrowDown: data.columns }[key];
  show((open + by + cells.length) % cells.length);
});

function show(i) {
  open = i;
  const of = data.cells[i];
  const image = cells[i].querySelector("img");
  const words = make("div", {}, make("h2", {}, of.title));
  if (of.error) words.append(make("p", { className: "bad" }, of.error));
  words.append(definitions(of.scores.map(([name, score, role]) => [name + role, shown(score)])));
  words.append(definitions(of.facts));
  words.append(...of.events.map((event) => make("p", { className: "note" }, event)));
  words.append(definitions(of.settings));
  if (of.command) words.append(make("pre", {}, of.command));
  const buttons = of.command ? [copier("Copy seed", of.seed), copier("Copy command", of.command)] : [];
  fill(make("div", {}, ...(image ? [image.cloneNode()] : [])), words, buttons);
}

/** Tints each cell by where its score lies between the lowest and the highest. */
function shade(name) {
  const values = data.cells.map((of) => of.scores.find(([known]) => known === name)?.[1] ?? null);
  const found = values.filter((value) => value !== null);
  const low = Math.min(...found);
  const high = Math.max(...found);
  cells.forEach((cell, i) => {
    const share = high > low ? (values[i] - low) / (high - low) : 0.5;
    cell.style.setProperty("--t", values[i] === null ? 0 : share);
  });
}

cells.forEach((cell, i) => cell.addEventListener("click", () => show(i)));
document.getElementById("shade").addEventListener("change", ({ target }) => shade(target.value));
