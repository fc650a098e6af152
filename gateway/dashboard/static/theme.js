// Before the first paint: the theme that was chosen here, if any.
try {
  const chosen = localStorage.getItem("tinsmith-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // No storage: as the system.
}
