// What the page does without asking the server: copying texts, and showing the result on a narrow screen.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) {
    const text = button.dataset.copy;
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // not over plain HTTP from another machine
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.classList.add("copied");
    setTimeout(() => button.classList.remove("copied"), 1200);
  }
  if (event.target.closest("#is-search") && matchMedia("(max-width: 860px)").matches) {
    document.getElementById("is-result")?.scrollIntoView({ behavior: "smooth" });
  }
});
