// Light or dark, before anything is drawn. Without a choice of the reader's the system's holds.
(() => {
  const chosen = localStorage.getItem("bequest.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
