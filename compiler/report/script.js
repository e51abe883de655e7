// Search, sorting and printing; the page reads the same without it.
"use strict";

for (const box of document.querySelectorAll(".search")) {
  const input = box.querySelector("input");
  const scope = box.parentElement;
  const items = [...scope.querySelectorAll("[data-item]")].map((node) => [node, node.textContent.toLowerCase()]);
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const [node, text] of items) {
      node.hidden = !words.every((word) => text.includes(word));
      found += node.hidden ? 0 : 1;
    }
    for (const group of scope.querySelectorAll(".pass, details.list")) {
      const some = group.querySelector("[data-item]:not([hidden])") !== null;
      group.hidden = !some;
      if (words.length && some && group.matches("details")) group.open = true;
    }
    box.querySelector("output").textContent = words.length ? `${found} of ${items.length}` : "";
  };
  input.addEventListener("input", filter);
  box.hidden = false;
}

for (const table of document.querySelectorAll("table.sortable")) {
  const bodies = [...table.tBodies];
  const value = (body, column) => {
    const cell = body.rows[0].cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
  };
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    if (header.tagName !== "TH") return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    header.replaceChildren(button);
    button.addEventListener("click", () => {
      const numeric = typeof value(bodies[0], column) === "number";
      const before = header.getAttribute("aria-sort");
      const up = before ? before === "descending" : !numeric;
      const order = (a, b) => {
        const [x, y] = [value(a, column), value(b, column)];
        return typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
      };
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", up ? "ascending" : "descending");
      table.append(...bodies.slice().sort((a, b) => (up ? order(a, b) : order(b, a))));
    });
  });
}

let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach((details) => (details.open = true));
});
addEventListener("afterprint", () => opened.forEach((details) => (details.open = false)));
