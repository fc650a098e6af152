// Sets the chosen theme before the first paint.
try {
  const chosen = localStorage.getItem("tinsmith-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Without storage, the theme is the system's.
}
