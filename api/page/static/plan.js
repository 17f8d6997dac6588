// Two pictures of the live view: the memory plan of each device, and what steps read beside what the memory can do.
import { $, el } from "./dom.js";

const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export function size(bytes) {
  const [unit, name] = UNITS.find(([least]) => bytes >= least) ?? [1, "B"];
  return `${(bytes / unit).toFixed(unit === 1 ? 0 : 1)} ${name}`;
}

// plan: as /v1/plan has it
export function showPlan({ memory, lines }) {
  $("plan-panel").hidden = false;
  $("plan").replaceChildren(...memory.map(device));
  if (!memory.length) $("plan").append(el("p", { class: "hint" }, "This engine has planned no memory."));
  $("plan-lines").textContent = lines.join("\n");
}

// A bar as long as the device's memory, or as what is needed if that is more, with its parts in words below.
function device({ device: name, limit_bytes: limit, free_bytes: free, items }) {
  const needed = items.reduce((sum, item) => sum + item.num_bytes, 0);
  const taken = Math.max(0, limit - free);
  const parts = [{ kind: "taken", label: "in use before the start", num_bytes: taken }, ...items].filter((part) => part.num_bytes);
  const whole = Math.max(limit, taken + needed) || 1;
  const bar = el("div", { class: "stack", role: "img", "aria-label": `Memory of ${name}, its parts are listed below` }, ...parts.map(({ kind, label, num_bytes: bytes }) => {
    const part = el("i", { class: kind, title: `${label}: ${size(bytes)}` });
    part.style.setProperty("--share", bytes / whole);
    return part;
  }));
  const left = free - needed;
  const verdict = left < 0 ? `${size(-left)} too much` : `${size(left)} left`;
  const entries = [...parts, { kind: "", label: "left", num_bytes: Math.max(0, left) }];
  return el("div", { class: "device" },
    el("b", {}, name), ` ${size(needed)} needed of ${size(free)} free (${size(limit)} in all), ${verdict}`, bar,
    el("ul", {}, ...entries.map(({ kind, label, num_bytes: bytes }) => el("li", {}, el("span", { class: `key ${kind}` }), el("span", {}, label), el("span", {}, size(bytes))))));
}

// rates: GB a second, oldest first; roof: what was measured at the start, or null; step: GB of the steps since the last
// look, each, or null.
export function showRoof(rates, roof, step) {
  const now = rates.at(-1) ?? 0;
  const most = Math.max(0, ...rates);
  const whole = roof || most || 1;
  $("roof").querySelector(".now").style.setProperty("--share", Math.min(1, now / whole));
  $("roof").querySelector(".peak").style.setProperty("--share", Math.min(1, most / whole));
  $("roof").hidden = !rates.length;
  $("roof-text").textContent = words(rates, roof, step, now, most);
  $("roof").setAttribute("aria-label", $("roof-text").textContent);
}

function words(rates, roof, step, now, most) {
  if (!rates.length) return "Not counted yet, or by the backend that computes the experts here.";
  const share = (rate) => (roof ? ` (${((100 * rate) / roof).toFixed(0)} %)` : "");
  const each = step === null ? "" : ` · ${short.format(step)} GB a step`;
  const bound = roof ? ` · this memory was measured at ${short.format(roof)} GB/s` : " · ktserve serve --measure-bandwidth says what this memory can do";
  return `Now ${short.format(now)} GB/s${share(now)}${each} · most seen ${short.format(most)} GB/s${share(most)}${bound}`;
}
