"use strict";
// Sorts a table by the column whose heading is pressed; rows in the foot stay where they are.
const said = document.getElementById("said");
function key(row, column) {
  const cell = row.children[column];
  if (cell === undefined || cell.colSpan > 1) return "";  // a row that failed
  const number = cell.dataset.value;
  return number === undefined ? cell.textContent.trim() : Number(number);
}
function order(a, b) {
  const numbers = typeof a === "number" && typeof b === "number";
  if (numbers) return (Number.isNaN(a) ? Infinity : a) - (Number.isNaN(b) ? Infinity : b);
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
  return a.localeCompare(b, undefined, { numeric: true });
}
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement;
    const column = Array.from(heading.parentElement.children).indexOf(heading);
    const rising = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of heading.parentElement.children) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const body = heading.closest("table").tBodies[0];
    const rows = Array.from(body.rows);
    rows.sort((a, b) => (rising ? 1 : -1) * order(key(a, column), key(b, column)));
    body.append(...rows);
    said.textContent = "Sorted by " + button.textContent + ", " + (rising ? "smallest" : "largest") + " first";
  });
}
