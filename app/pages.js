"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

/** An element with properties and children; texts among them stay texts. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function definitions(pairs) {
  return make("dl", {}, ...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}

function shown(score) {
  if (score === null || score === undefined) return "–";
  return Math.abs(score) >= 1000 ? score.toPrecision(4) : score.toFixed(3);
}

/** A button that copies a text; file:// pages may not have the clipboard, but they have selections. */
function copier(label, text) {
  const button = make("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = make("textarea", { value: text });
      button.after(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1200);
  });
  return button;
}

/** The dialog that shows one thing at a time: `open(i)` fills it, `step(by)` goes on. */
function browse(step) {
  const box = document.querySelector("dialog");
  document.getElementById("back").addEventListener("click", () => step("ArrowLeft"));
  document.getElementById("on").addEventListener("click", () => step("ArrowRight"));
  document.getElementById("close").addEventListener("click", () => box.close());
  box.addEventListener("click", (event) => { if (event.target === box) box.close(); });
  box.addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) {
      event.preventDefault();
      step(event.key);
    }
  });
  return (left, right, buttons) => {
    box.querySelector(".inside").replaceChildren(left, right);
    box.querySelector(".copies").replaceChildren(...buttons);
    if (!box.open) box.showModal();
    box.scrollTop = 0;
  };
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).getPropertyValue("--paper").trim() !== "#fff";
  root.dataset.theme = dark ? "light" : "dark";
});
