// Sorts the rows of a table by the column whose title the reader clicks, first the largest or first
// letter. A second click reverses the order. Cells that are not numbers are sorted as text.
(() => {
'use strict';
const number = (text) => {
  const found = /^<?([-+]?[\d,]*\.?\d+)/.exec(text);
  return found ? Number(found[1].replaceAll(',', '')) : null;
};
const sort = (table, heads, column) => {
  const head = heads[column];
  const rows = [...table.rows].slice(1);
  const texts = new Map(rows.map((row) => [row, row.cells[column]?.textContent.trim() ?? '']));
  const isNumeric = head.classList.contains('pp-number');
  const before = head.getAttribute('aria-sort');
  const down = before ? before === 'ascending' : isNumeric;
  const compare = (a, b) => {
    if (!isNumeric) return texts.get(a).localeCompare(texts.get(b), undefined, {numeric: true});
    return (number(texts.get(a)) ?? -Infinity) - (number(texts.get(b)) ?? -Infinity) || 0;
  };
  for (const each of heads) each.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  rows.sort((a, b) => (down ? -1 : 1) * compare(a, b));
  for (const row of rows) row.parentNode.append(row);
};
for (const table of document.querySelectorAll('table.pp-sortable')) {
  const heads = [...table.rows[0].cells];
  for (const [column, head] of heads.entries()) {
    const button = document.createElement('button');
    button.append(...head.childNodes);
    button.type = 'button';
    head.append(button);
    button.addEventListener('click', () => sort(table, heads, column));
  }
}
})();
