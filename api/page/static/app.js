// Tabs, theme, the settings' drawer, and what the server is doing.
import { Adapters } from "./adapters.js";
import { call, ServerError } from "./api.js";
import { Chat } from "./chat.js";
import { $ } from "./dom.js";
import { Live } from "./live.js";
import * as settings from "./settings.js";
import { Tuning } from "./tuning.js";

const HEALTH_MS = 5000;
const THEMES = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
const system = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  const [sign, words] = THEMES[name];
  localStorage.setItem("ktserve.theme", name);
  document.documentElement.dataset.theme = name === "auto" ? (system.matches ? "dark" : "light") : name;
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", `Colours: ${words}`);
  $("theme").title = `Colours: ${words}`;
}

function theme() {
  const stored = localStorage.getItem("ktserve.theme");
  return stored in THEMES ? stored : "auto";
}

setTheme(theme());
system.addEventListener("change", () => setTheme(theme()));
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(theme()) + 1) % names.length]);
});

let suited = null; // the base model whose capabilities are known
settings.setUp(() => {
  adapters.unlock();
  tuning.forget();
  suited = null;
  refresh();
});
const chat = new Chat();
const live = new Live();
const adapters = new Adapters(refresh);
const tuning = new Tuning(compare);
const views = { chat, adapters, tuning, live };

// Opens the playground with a column for each model.
async function compare(models) {
  await refresh(); // a checkpoint may be newer than the last look
  if (!chat.compare(models)) return;
  openTab("chat");
  $("prompt").focus();
}

function openTab(name) {
  for (const other of Object.keys(views)) {
    const chosen = other === name;
    $(`tab-${other}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${other}`).tabIndex = chosen ? 0 : -1;
    $(other).hidden = !chosen;
    views[other].watch?.(chosen);
  }
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
}

const tabs = document.querySelector('[role="tablist"]');
tabs.addEventListener("click", (event) => event.target.id && openTab(event.target.id.replace("tab-", "")));
tabs.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const names = Object.keys(views);
  const at = names.indexOf(document.activeElement.id.replace("tab-", ""));
  const name = names.at((at + step) % names.length);
  openTab(name);
  $(`tab-${name}`).focus();
});

function showSettings(open) {
  $("settings").classList.toggle("open", open);
  $("open-settings").setAttribute("aria-expanded", String(open));
  (open ? $("key") : $("open-settings")).focus();
}
$("open-settings").addEventListener("click", () => showSettings(!$("settings").classList.contains("open")));
$("close-settings").addEventListener("click", () => showSettings(false));
$("settings").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (chat.busy) chat.stop();
  else showSettings(false);
});

function setState(text, kind) {
  $("state").className = `state ${kind}`;
  if ($("state").textContent !== text) $("state").textContent = text;
}

// /health needs no key and answers 503 with a reason while the engine is not ready.
async function health() {
  const response = await fetch("health", { credentials: "omit" });
  const seen = await response.json();
  if (response.ok) return null;
  const { stage, done, total } = seen.loading ?? {};
  return stage ? `${seen.status}: ${stage} ${total ? Math.floor((100 * done) / total) : 0} %` : seen.status;
}

// Asks once for what a base model can do.
async function suit(base) {
  if (!base || base === suited) return;
  try {
    chat.suit((await (await call("api/show", { body: { model: base } })).json()).capabilities);
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    chat.suit([]); // a proxy may publish /v1 alone: the prompts are general then
  }
  suited = base;
}

async function refresh() {
  try {
    const trouble = await health();
    if (trouble) return setState(trouble, "down");
    const models = (await (await call("v1/models")).json()).data;
    chat.offer(models);
    adapters.offer(models);
    await suit(models.find((model) => !model.parent)?.id);
    setState("ready", "up");
  } catch (error) {
    setState(error instanceof ServerError ? error.message : "not reachable", "down");
  }
}

async function keepWatch() {
  if (!document.hidden) await refresh();
  setTimeout(keepWatch, HEALTH_MS);
}

if (location.hash.slice(1) in views) openTab(location.hash.slice(1));
keepWatch();
