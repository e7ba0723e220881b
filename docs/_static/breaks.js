// Where lines break. A number stays in one line with its exponent, and in a table with its
// unit. Long names may break where a reader would break them: after an underscore, a bracket
// or a dot. So no column needs the width of its longest name.
window.addEventListener("DOMContentLoaded", () => {
  for (const cell of document.querySelectorAll("article td, article th")) {
    const isNumber = /^[\d.,]+( ± [\d.,]+)? ?[a-zA-Z%]{0,3}$/.test(cell.textContent.trim());
    cell.classList.toggle("number", isNumber);
  }
  const exponent = /((?<![\w.)\]])(?:2\^-?\d+|[\d.]+e-\d+|-[\d.]+(?:e-?\d+)?|-Inf\b))/;
  const spots = /(?<=[_(/=\[]|,(?=\S)|\.(?=[a-z_]))(?=[^)\]])/i;
  for (const part of document.querySelectorAll("article :is(p, li, td, th, h1, h2, h3)")) {
    const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      const isCode = text.parentElement.closest("code, td, th");
      if (text.parentElement.closest("pre, .number")) continue;
      const pieces = text.data.split(exponent).flatMap((piece, i) => {
        if (i % 2) {
          const number = document.createElement("span");
          number.className = "number";
          number.append(piece);
          return [number];
        }
        const names = isCode ? piece.split(spots) : [piece];
        return names.flatMap((name, j) => (j ? [document.createElement("wbr"), name] : [name]));
      });
      if (pieces.length > 1) text.replaceWith(...pieces);
    }
  }
});
