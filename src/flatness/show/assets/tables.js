// Sorts a table by the column whose heading is pressed; what has no value comes last, rows in the foot stay.
// Of a long table only the first rows are in the page: a browser takes seconds to lay out thousands anew.
const ROWS = 200;
const said = document.getElementById("said");
const collator = new Intl.Collator(undefined, { numeric: true });
const long = new Map();  // long tables: all rows in their order, and the button that shows them all
const rowsOf = (table) => long.has(table) ? long.get(table).rows : Array.from(table.tBodies[0].rows);
function showRows(table, count) {
  const { rows, button } = long.get(table);
  table.tBodies[0].replaceChildren(...rows.slice(0, count));
  button.hidden = count >= rows.length;
}
function key(row, column) {
  const cell = row.children[column];
  if (cell === undefined || cell.colSpan > 1) return "";  // a row that failed
  const number = cell.dataset.value;
  if (number === undefined) return cell.textContent.trim();
  return number === "" || Number.isNaN(Number(number)) ? "" : Number(number);
}
function order(a, b, sign) {
  if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
  if (typeof a === "number" && typeof b === "number") return sign * (a === b ? 0 : a - b);
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return sign * collator.compare(a, b);
}
function resort(table) {  // by the column it is sorted by already, after values changed
  const heading = table.tHead.querySelector('th[aria-sort$="ending"]');
  if (heading === null) return;
  const column = Array.from(heading.parentElement.children).indexOf(heading);
  const sign = heading.getAttribute("aria-sort") === "ascending" ? 1 : -1;
  const keyed = rowsOf(table).map((row) => [key(row, column), row]);
  const ordered = keyed.sort((a, b) => order(a[0], b[0], sign)).map(([, row]) => row);
  if (!long.has(table)) return table.tBodies[0].append(...ordered);
  long.get(table).rows = ordered;
  showRows(table, ROWS);
}
for (const table of document.querySelectorAll("table")) {
  const rows = rowsOf(table), number = rows.length.toLocaleString("en");
  if (rows.length <= ROWS) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain rest";
  button.textContent = "Show all " + number + " rows";
  button.addEventListener("click", () => {
    showRows(table, Infinity);
    table.closest(".scroll").focus();
    said.textContent = "All " + number + " rows are shown";
  });
  table.closest(".scroll").after(button);
  long.set(table, { rows, button });
  showRows(table, ROWS);
}
addEventListener("beforeprint", () => { for (const table of long.keys()) showRows(table, Infinity); });
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const rising = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of heading.parentElement.children) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    resort(heading.closest("table"));
    said.textContent = "Sorted by " + button.textContent + ", " + (rising ? "smallest" : "largest") + " first";
  });
}
