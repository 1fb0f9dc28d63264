// The invariance plot: every measure over the rewritten networks, divided by its value for the original.
const check = JSON.parse(document.getElementById("data").textContent);
{
  const kinds = [...new Set(check.rows.map((row) => row.kind))];
  const state = { kind: kinds[0], place: "", off: new Set() };
  const placesOf = (kind) => [...new Set(check.rows.filter((row) => row.kind === kind).map((row) => row.place))];
  state.place = placesOf(state.kind).includes("network") ? "network" : placesOf(state.kind)[0];
  // Those that move in some way come first, with colours that no other has; what stays is grey while it stays.
  const moves = new Set(check.rows.filter((row) => !row.holds).map((row) => row.name));
  const quantities = [...new Set([...moves, ...check.rows.map((row) => row.name)])];
  const look = (row) => row.holds ? [COLOURS[6], lookOf(quantities.indexOf(row.name))[1], true] : lookOf(quantities.indexOf(row.name));
  const holder = document.getElementById("plot"), controls = document.getElementById("controls");
  const legend = element("ul", { class: "legend", "aria-label": "Measures; press one to hide or show it" });
  const plot = new Plot(holder, 420);
  holder.after(legend);

  function lines() {
    return check.rows.filter((row) => row.kind === state.kind && row.place === state.place).map((row) => ({
      ...row, look: look(row),
      ratios: [row.value, ...row.values].map((value) => value / row.value),
    })).sort((a, b) => a.holds - b.holds);
  }
  function draw() {
    const found = lines(), shown = found.filter((row) => !state.off.has(row.name));
    const drawn = (ratio) => isNumber(ratio) && ratio > 0;
    const ratios = shown.flatMap((row) => row.ratios).filter(drawn);
    const trials = Math.max(0, ...found.map((row) => row.values.length));
    // A flat line needs room around it, or rounding would look like a mountain.
    const y = scaleOf([...ratios, 0.8, 1.25], true);
    // Measures that stay lie on one line: their marks stand side by side, so that each is seen.
    const still = shown.filter((row) => row.holds), step = Math.min(0.09, 0.8 / Math.max(still.length, 1));
    const aside = (row) => row.holds ? (still.indexOf(row) - (still.length - 1) / 2) * step : 0;
    const marks = shown.flatMap((row) => row.ratios.map((ratio, trial) => ({ x: trial + aside(row), y: ratio, look: row.look, row, trial })));
    plot.show({
      x: scaleOf([-0.5, trials + 0.5], false), y, level: 1,
      xTicks: Array.from({ length: trials + 1 }, (_, i) => [i, i === 0 ? "original" : String(i)]),
      xLabel: "rewritten network", yLabel: "value ÷ value of the original",
      lines: shown.map((row) => ({ colour: row.look[0], dash: row.holds ? null : "5 3",
        points: row.ratios.map((ratio, trial) => [trial, ratio]).filter(([, ratio]) => drawn(ratio)) })),
      marks: marks.filter((mark) => drawn(mark.y)),
      summary: `${shown.length} measures of ${state.place} over ${trials} ${state.kind} rescalings: ` +
        `${shown.filter((row) => row.holds).length} stay as they are.`,
      tell: (mark, others) => [others.length > 0 ? `${others.length + 1} measures, ${which(mark)}` : words(mark.row.name),
        others.length > 0 ? [mark, ...others].map(({ row, y: ratio }) => [words(row.name), `× ${short(ratio)}`])
          : [["network", which(mark)], ["value", short([mark.row.value, ...mark.row.values][mark.trial])], ["÷ original", short(mark.y)],
            ["largest drift", short(mark.row.drift)], ["verdict", mark.row.verdict]]],
    });
    legend.replaceChildren(...found.map((row) => {
      const button = element("button", { type: "button", "aria-pressed": String(!state.off.has(row.name)) },
        symbol(row.look), words(row.name) + (row.holds ? "" : ` × ${range(row.ratios)}`));
      button.addEventListener("click", () => {
        if (!state.off.delete(row.name)) state.off.add(row.name);
        draw();
        Array.from(legend.querySelectorAll("button"))[found.indexOf(row)].focus();
      });
      return element("li", {}, button);
    }));
    const missing = shown.flatMap((row) => row.ratios).length - marks.filter((mark) => drawn(mark.y)).length;
    const stay = shown.filter((row) => row.holds).length;
    document.getElementById("count").textContent = `${shown.length} of ${found.length} measures, ${state.place}: ${stay} stay as they are, ` +
      `${shown.length - stay} move` + (missing > 0 ? `; ${missing} values that are zero, negative or not finite are not drawn` : "");
  }
  const which = ({ trial }) => trial === 0 ? "original" : `rewritten ${trial}`;
  const range = (ratios) => {
    const fine = ratios.slice(1).filter(isNumber);
    return fine.length ? `${Number(Math.min(...fine).toPrecision(2))} … ${Number(Math.max(...fine).toPrecision(2))}` : "?";
  };
  function control() {
    const places = placesOf(state.kind);
    if (!places.includes(state.place)) state.place = places[0];
    controls.replaceChildren(
      chooser("Rewritten", kinds.map((kind) => [kind, kind]), state.kind, (value) => { state.kind = value; control(); draw(); refocus(0); }),
      chooser("Of", places.map((place) => [place, place]), state.place, (value) => { state.place = value; draw(); }));
  }
  const refocus = (i) => controls.querySelectorAll("select")[i].focus();
  control();
  draw();
}
