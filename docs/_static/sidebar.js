// The sidebar is longer than a screen: bring the page that is open into sight.
window.addEventListener("load", () => {
  const drawer = document.querySelector(".sidebar-scroll");
  const here = drawer?.querySelector(".sidebar-tree .current-page > a");
  if (!here) return;
  const box = drawer.getBoundingClientRect();
  const { top, bottom } = here.getBoundingClientRect();
  if (top < box.top || bottom > box.bottom - 40) {
    const middle = drawer.scrollTop + top - box.top - drawer.clientHeight / 2;
    drawer.scrollTo({ top: middle, behavior: "instant" });
  }
});
