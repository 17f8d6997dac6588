// What is sent with every message, and the keys. Settings are kept in this browser; keys in this tab only.
import { keys, ServerError } from "./api.js";
import { $ } from "./dom.js";

const STORE = "ktserve.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty"];
const fields = () => [...document.querySelectorAll("[data-field]")];
const field = (name) => document.querySelector(`[data-field="${name}"]`);

export function setUp(keyChanged) {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(STORE) ?? "{}") ?? {};
  } catch {
    localStorage.removeItem(STORE); // written by something else
  }
  for (const input of fields()) {
    const value = stored[input.dataset.field];
    if (input.type === "checkbox") input.checked = value === true;
    else if (typeof value === "string") input.value = value;
    input.addEventListener("input", save);
  }
  for (const [id, name] of [["key", "api"], ["admin-key", "admin"]]) {
    keys[name] = $(id).value = sessionStorage.getItem(`ktserve.${name}`) ?? "";
    $(id).addEventListener("input", () => {
      keys[name] = $(id).value.trim();
      sessionStorage.setItem(`ktserve.${name}`, keys[name]);
    });
    $(id).addEventListener("change", keyChanged);
  }
  $("reset").addEventListener("click", () => {
    for (const input of fields()) {
      if (input.type === "checkbox") input.checked = input.defaultChecked;
      else input.value = input.defaultValue;
    }
    save();
  });
}

function save() {
  const values = Object.fromEntries(fields().map((input) => [input.dataset.field, input.type === "checkbox" ? input.checked : input.value]));
  localStorage.setItem(STORE, JSON.stringify(values));
}

export const systemPrompt = () => field("system").value.trim();

// The request's fields beside model and messages: only what was filled in. Raises ServerError for what is malformed.
export function parameters() {
  const out = {};
  for (const name of NUMBERS) {
    const input = field(name);
    if (!input.checkValidity()) throw new ServerError(`${input.parentElement.firstChild.textContent.trim()}: ${input.validationMessage}`);
    if (input.value !== "") out[name] = Number(input.value);
  }
  const stop = field("stop").value.split("\n").filter(Boolean);
  if (stop.length) out.stop = stop;
  for (const [name, shown] of [["tools", "Tools"], ["chat_template_kwargs", "Template variables"]]) {
    if (!field(name).value.trim()) continue;
    try {
      out[name] = JSON.parse(field(name).value);
    } catch (error) {
      throw new ServerError(`${shown}: this is not JSON.`, error.message);
    }
  }
  if (field("logprobs").checked) {
    out.logprobs = true;
    out.top_logprobs = Number(field("top_logprobs").value || 0);
  }
  return out;
}
