// Sorts a table by the column whose heading is pressed; what has no value comes last, rows in the foot stay.
const said = document.getElementById("said");
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
  return sign * a.localeCompare(b, undefined, { numeric: true });
}
function resort(table) {  // by the column it is sorted by already, after values changed
  const heading = table.tHead.querySelector('th[aria-sort$="ending"]');
  if (heading === null) return;
  const column = Array.from(heading.parentElement.children).indexOf(heading);
  const sign = heading.getAttribute("aria-sort") === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const keyed = Array.from(body.rows, (row) => [key(row, column), row]);
  keyed.sort((a, b) => order(a[0], b[0], sign));
  body.append(...keyed.map(([, row]) => row));
}
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
