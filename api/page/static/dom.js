// The only way in which this page makes elements: text is always a text node, never markup.

export const $ = (id) => document.getElementById(id);

// el("p", {class: "x", onclick: f}, "text", node, ...); functions become listeners, other values attributes.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// Copies `text`, and says so on the button for a moment.
export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // browsers allow it on https and localhost alone
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

// Shows an error in `node`, or nothing: what it is, and the server's reason.
export function complain(node, error) {
  node.hidden = !error;
  if (error) node.replaceChildren(error.message, error.detail ? el("small", {}, error.detail) : "");
}
