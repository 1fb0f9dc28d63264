// Pictures that are drawn in the page already: pointing at a mark, or walking over them with the arrow keys, tells what it is.
for (const svg of document.querySelectorAll("figure > svg")) {
  const marks = Array.from(svg.querySelectorAll("g")).filter((g) => g.querySelector("title"));
  const texts = marks.map((g) => { const title = g.querySelector("title"), text = title.textContent; title.remove(); return text; });
  const holder = svg.parentElement, tip = element("div", { class: "tip", "aria-hidden": "true", hidden: true });
  holder.append(tip);
  let at = -1;
  const show = (index) => {
    if (at >= 0) marks[at].classList.remove("pointed");
    at = index; tip.hidden = at < 0;
    if (at < 0) return;
    marks[at].classList.add("pointed");
    tip.textContent = texts[at];
    const mark = marks[at].getBoundingClientRect(), box = holder.getBoundingClientRect();
    tip.style.left = Math.max(0, Math.min(mark.right - box.left + 8, box.width - tip.offsetWidth)) + "px";
    tip.style.top = Math.max(0, mark.top - box.top - tip.offsetHeight - 4) + "px";
  };
  marks.forEach((g, i) => { g.addEventListener("pointerenter", () => show(i)); g.addEventListener("pointerleave", () => show(-1)); });
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("blur", () => show(-1));
  svg.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: marks.length - 1 }[event.key];
    if (event.key === "Escape") show(-1);
    if (to === undefined || marks.length === 0) return;
    event.preventDefault();
    show(Math.max(0, Math.min(to, marks.length - 1)));
    said.textContent = texts[at];
  });
}
