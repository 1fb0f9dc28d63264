// What one can choose on the page of a study, and the record of one network.
const controls = byId("controls");
const measures = [...new Set(study.columns.map((column) => column.measure))];
const placesOf = (measure) => study.columns.map((column, i) => [i, column]).filter(([, column]) => column.measure === measure);
function choose(column) {
  state.column = column;
  if (!study.columns[column].rescaled) state.copy = "values";
  control(); redraw();
}
function chooseMeasure(measure) {  // the same layer where the measure has it, else the network, else the first
  const place = study.columns[state.column].place, places = placesOf(measure);
  const same = places.find(([, column]) => column.place === place) ||
    places.find(([, column]) => column.place.startsWith("network")) || places[0];
  choose(same[0]);
}
function control() {
  const focus = Array.from(controls.querySelectorAll("select, input")).indexOf(document.activeElement);
  const column = study.columns[state.column];
  const fields = [];
  if (study.parts.length > 1) fields.push(chooser("Part", study.parts.map((part, i) => [i, part.name]), state.part, (value) => {
    state.part = Number(value); state.filters.clear(); filters(); update();
  }));
  fields.push(chooser("Measure", measures.map((name) => [name, words(name)]), column.measure, chooseMeasure));
  fields.push(chooser("Layer", placesOf(column.measure).map(([i, one]) => [i, one.place]), state.column, (value) => choose(Number(value))));
  if (study.columns.some((one) => one.rescaled)) fields.push(chooser("Networks", [["values", "as trained"], ...(column.rescaled ?
    [["rescaled", "rescaled copies"]] : [])], state.copy, (value) => { state.copy = value; redraw(); }));
  fields.push(chooser("Against", study.targets.map((target, i) => [i, target.label || study.parts[state.part].gap]), state.target, (value) => {
    state.target = Number(value); redraw();
  }));
  const varying = study.axes.map((axis, i) => [i, words(axis.name)]).filter(([i]) => study.axes[i].varies);
  for (const [name, none] of [["Colour", "one colour"], ["Shape", "as colour"]]) {
    const key = name.toLowerCase(), fits = ([i]) => key === "colour" || study.axes[i].values.length <= OUTLINES.length;
    fields.push(chooser(name, [[-1, none], ...varying.filter(fits)], state[key], (value) => { state[key] = Number(value); drawScatter(); legend(); }));
  }
  fields.push(element("div", { class: "ticks" },
    ticker("x logarithmic", state.logX, (on) => { state.logX = on; drawScatter(); }),
    ticker("y logarithmic", state.logY, (on) => { state.logY = on; drawScatter(); })));
  controls.replaceChildren(...fields);
  if (focus >= 0) controls.querySelectorAll("select, input")[focus].focus();
}

// ---- filters: boxes for few values, a range for many numbers
const FEW = 12;
function filters() {
  const within = all.filter((i) => partOf(i) === state.part);
  const groups = study.axes.map((axis, number) => [axis, number, [...new Set(within.map((i) => axis.codes[i]))].sort((a, b) => a - b)])
    .filter(([, , codes]) => codes.length > 1)
    .map(([axis, number, codes]) => codes.length > FEW && axis.values.every(isNumber) ? ranged(axis, number, codes) : boxed(axis, number, codes));
  const left = within.filter((i) => study.out[i] >= 0).length;
  if (left > 0) groups.push(element("fieldset", {}, element("legend", {}, "analysis"),
    ticker(`also the ${left} networks left out of it`, state.left, (on) => { state.left = on; update(); })));
  const reset = element("button", { type: "button", class: "plain" }, "Show all");
  reset.addEventListener("click", () => { state.filters.clear(); state.left = false; filters(); update(); byId("filters").querySelector("button").focus(); });
  byId("filters").replaceChildren(...groups, reset);
}
function boxed(axis, number, codes) {
  const off = new Set();
  return element("fieldset", {}, element("legend", {}, words(axis.name)), ...codes.map((code) =>
    ticker(label(axis, code), true, (on) => {
      if (on) off.delete(code); else off.add(code);
      if (off.size > 0) state.filters.set(number, (one) => !off.has(one)); else state.filters.delete(number);
      update();
    })));
}
function ranged(axis, number, codes) {
  const ends = [axis.values[codes[0]], axis.values[codes[codes.length - 1]]], asked = [...ends];
  const input = (end, label) => {
    const field = element("input", { type: "number", step: "any", placeholder: plain(ends[end]), "aria-label": `${words(axis.name)} ${label}` });
    field.addEventListener("change", () => {
      asked[end] = field.value === "" ? ends[end] : Number(field.value);
      const kept = (code) => axis.values[code] >= asked[0] && axis.values[code] <= asked[1];
      if (codes.every(kept)) state.filters.delete(number); else state.filters.set(number, kept);
      update();
    });
    return field;
  };
  return element("fieldset", {}, element("legend", {}, words(axis.name)), input(0, "from"), " to ", input(1, "to"));
}

// ---- one network's record
const panel = byId("record");
let cameFrom = null;
function curve(values, every) {  // training loss by epoch
  const fine = values.filter(isNumber), logarithmic = fine.every((value) => value > 0), y = scaleOf(fine, logarithmic);
  const path = values.map((value, i) => isNumber(value) ? `${(4 + 292 * i / Math.max(values.length - 1, 1)).toFixed(1)} ${(64 - 60 * y.share(value)).toFixed(1)}` : null)
    .filter((point) => point !== null).join("L");
  return element("figure", {}, shape("svg", { viewBox: "0 0 300 68", class: "curve", role: "img",
    "aria-label": `Training loss from ${short(values[0])} to ${short(values[values.length - 1])}` },
    shape("path", { class: "axis", d: "M4 4V64H296" }), shape("path", { class: "line", d: "M" + path, stroke: COLOURS[0] })),
    element("figcaption", {}, `training loss ${short(values[0])} → ${short(values[values.length - 1])}` +
      `${logarithmic ? ", log scale" : ""}${every > 1 ? `, every ${every} epochs` : ""}`));
}
function openRecord(i, keyboard) {
  if (!panel.contains(document.activeElement)) cameFrom = document.activeElement;
  state.open = i;
  const close = element("button", { type: "button", class: "plain" }, "Close");
  close.addEventListener("click", closeRecord);
  const heading = element("h3", { tabindex: -1, id: "record-name" }, [`Network ${i + 1}`, describe(i).map((pair) => pair.join(" ")).join(", ")].filter(Boolean).join(": "));
  const facts = [...study.axes.map((axis) => [words(axis.name), label(axis, axis.codes[i])]),
    ...study.facts.map((fact) => [fact.name.replaceAll(".", " · ").replaceAll("_", " "), fact.values ? fact.values[i] : fact.same])
      .filter(([, value]) => value !== null).map(([name, value]) => [name, Number.isInteger(value) ? String(value) : short(value)])];
  const values = study.columns.filter((column) => column.values[i] !== null).map((column) => element("tr", {},
    element("th", { scope: "row" }, nameOf(column)), element("td", {}, told(column, i)),
    ...(study.columns.some((one) => one.rescaled) ? [element("td", {}, column.rescaled ? told(column, i, "rescaled") : "")] : []),
    element("td", { class: "word" }, typeof column.method === "string" ? column.method : study.methods[column.method[i]] || "")));
  const heads = ["quantity", "value", ...(study.columns.some((one) => one.rescaled) ? ["rescaled"] : []), "method"];
  const table = element("table", {}, element("caption", {}, "Every value; * an iteration did not arrive"),
    element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col", class: text === "value" || text === "rescaled" ? "head" : "head text" }, text)))), element("tbody", {}, ...values));
  const file = `records/${study.keys[i]}.json`;
  panel.replaceChildren(element("div", { class: "between" }, heading, close),
    ...(study.out[i] >= 0 ? [element("p", { class: "failed" }, `Left out of the analysis: ${study.reasons[study.out[i]]}.`)] : []),
    element("p", {}, "The file: ", element("a", { href: encodeURI(file) }, file)),
    ...(study.curves[i] && study.curves[i].length > 1 ? [curve(study.curves[i], study.every[i])] : []),
    element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
    ...(values.length > 0 ? [element("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "Values of this network" }, table)] : []));
  panel.hidden = false;
  markOpen();
  said.textContent = `Record of network ${i + 1}`;
  if (keyboard) heading.focus();
}
function closeRecord() {
  panel.hidden = true; state.open = -1;
  markOpen();
  if (cameFrom) cameFrom.focus();
}
function markOpen() {
  for (const row of byId("rows").querySelectorAll("tbody tr")) row.setAttribute("aria-current", String(Number(row.dataset.row) === state.open));
  drawScatter();
}
panel.addEventListener("keydown", (event) => { if (event.key === "Escape") closeRecord(); });
for (const table of tables) table.tBodies[0].addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) choose(columnOf.get(button.closest("tr").dataset.quantity));
});
if (study.columns.length > 0) {
  state.column = Math.max(0, columnOf.get(study.first) ?? 0);
  state.logX = analysed().every((i) => !isNumber(study.columns[state.column].values[i]) || study.columns[state.column].values[i] > 0);
  byId("explore").hidden = false;  // first, so that the plot knows its width
  control(); filters(); update();
} else {  // nothing is measured yet
  state.left = true;
  shown = all;
  listNetworks();
}
// Sorting every quantity once, while nobody waits, makes the first filter as quick as the others.
(window.requestIdleCallback || setTimeout)(() => { for (const column of study.columns) orderOf(column.values); });
