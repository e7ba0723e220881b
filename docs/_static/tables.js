// A number in a table stays in one line with its unit. Long names may break where a reader
// would break them: after an underscore, a bracket or a dot. So no column needs the width of
// its longest name.
window.addEventListener("DOMContentLoaded", () => {
  for (const cell of document.querySelectorAll("article td, article th")) {
    const isNumber = /^[\d.,]+( ± [\d.,]+)? ?[a-zA-Z%]{0,3}$/.test(cell.textContent.trim());
    cell.classList.toggle("number", isNumber);
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      const parts = text.data.split(/(?<=[_(/=\[]|,(?=\S)|\.(?=[a-z_]))(?=[^)\]])/i);
      if (parts.length < 2) continue;
      const pieces = parts.flatMap((part) => [document.createElement("wbr"), part]);
      text.replaceWith(...pieces.slice(1));
    }
  }
});
