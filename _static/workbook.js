/* What a page does in the browser: folds open for printing, and wide boxes can be scrolled with the keyboard. */
(() => {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll(".bd-article details:not([open])")];
    opened.forEach((fold) => { fold.open = true; });
  });
  addEventListener("afterprint", () => {
    opened.forEach((fold) => { fold.open = false; });
    opened = [];
  });

  const boxes = ".bd-article :is(pre, table, .output, .cell_output, mjx-container[display='true'], .workbook-exercise, .workbook-check)";
  const reach = () => document.querySelectorAll(boxes).forEach((box) => {
    const scrolls = box.scrollWidth > box.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(box).overflowX);
    if (scrolls && !box.hasAttribute("tabindex")) box.dataset.scrolls = box.tabIndex = 0;
    else if (!scrolls && "scrolls" in box.dataset) { box.removeAttribute("tabindex"); delete box.dataset.scrolls; }
  });
  addEventListener("load", () => Promise.resolve(window.MathJax?.startup?.promise).then(reach));
  addEventListener("resize", reach);
})();
