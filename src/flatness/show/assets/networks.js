// The table of networks: those that are shown, so many at a time, sorted by any of its columns.
const PAGE = 50;
const list = { column: "", rising: true, limit: PAGE };
function listColumns() {  // heading, value to sort by, text
  const chosen = study.columns[state.column];
  return [
    ["network", (i) => i + 1, (i) => String(i + 1)],
    ...study.axes.filter((axis) => axis.varies && axis.name !== "status").map((axis) => [words(axis.name), (i) => axis.values[axis.codes[i]], (i) => label(axis, axis.codes[i])]),
    ["in the analysis", (i) => study.out[i] < 0 ? "yes" : study.reasons[study.out[i]]],
    ...study.targets.map((target) => [target.label || study.parts[state.part].gap, (i) => target.values[i]]),
    ...(!chosen ? [] : [[nameOf(chosen) + copied(), (i) => (chosen[state.copy] || [])[i], (i) => chosen[state.copy] ? told(chosen, i, state.copy) : ""]]),
  ];
}
function networkRow(i, columns) {
  const link = element("a", { href: encodeURI(`records/${study.keys[i]}.json`) }, columns[0][2](i));
  link.addEventListener("click", (event) => { event.preventDefault(); openRecord(i, true); });
  return element("tr", { "data-row": i, "aria-current": String(i === state.open) }, element("th", { scope: "row" }, link),
    ...columns.slice(1).map(([, value, text]) => element("td", { class: isNumber(value(i)) ? null : "word" }, (text || ((one) => short(value(one))))(i))));
}
function listNetworks() {
  const columns = listColumns(), by = columns.find(([name]) => name === list.column);
  const empty = (value) => value === null || value === undefined ? "" : value;
  const ordered = by ? shown.map((i) => [empty(by[1](i)), i]).sort((a, b) => order(a[0], b[0], list.rising ? 1 : -1)).map(([, i]) => i) : shown;
  const heads = columns.map(([name]) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      list.rising = list.column === name ? !list.rising : true;
      list.column = name;
      listNetworks();
      said.textContent = `Sorted by ${name}, ${list.rising ? "smallest" : "largest"} first`;
      byId("rows").querySelectorAll("thead button")[columns.findIndex((one) => one[0] === name)].focus();
    });
    return element("th", { scope: "col", "aria-sort": list.column !== name ? "none" : list.rising ? "ascending" : "descending" }, button);
  });
  const visible = ordered.slice(0, list.limit), rest = ordered.length - visible.length;
  const more = element("button", { type: "button", class: "plain" }, `Show all ${ordered.length}`);
  more.addEventListener("click", () => { list.limit = Infinity; listNetworks(); });
  const caption = `${rest > 0 ? `The first ${visible.length} of ` : ""}${ordered.length} networks; a network's heading opens its record`;
  byId("rows").replaceChildren(
    element("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "Networks" }, element("table", {},
      element("caption", {}, caption), element("thead", {}, element("tr", {}, ...heads)),
      element("tbody", {}, ...visible.map((i) => networkRow(i, columns))))),
    ...(rest > 0 ? [more] : []));
}
addEventListener("beforeprint", () => { list.limit = Infinity; listNetworks(); });
