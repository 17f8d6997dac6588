// The playground: one to three columns, each a model and its own conversation; a message goes to all of them.
import { Answer } from "./answer.js";
import { call, curlOf, events } from "./api.js";
import { $, copy, el } from "./dom.js";
import { render } from "./markdown.js";
import { promptsFor } from "./prompts.js";
import { parameters, systemPrompt } from "./settings.js";

const MOST_COLUMNS = 3;
const PATH = "v1/chat/completions";
const KEPT = "ktserve.conversations"; // of this tab, so that a reload keeps them

class Column {
  constructor(chat, model, history = [], tools = null) {
    this.chat = chat;
    this.history = history; // messages that have been answered, and their answers
    this.tools = tools; // of a prompt that came with some, while its conversation lasts
    this.running = null; // an AbortController
    this.select = el("select", { "aria-label": "Model or adapter" });
    this.close = el("button", { type: "button", class: "quiet tiny", "aria-label": "Close this column", onclick: () => chat.remove(this) }, "✕");
    this.turns = el("div", { class: "turns", role: "log", tabindex: "0", "aria-label": "Conversation" });
    this.node = el("section", { class: "column" }, el("header", {}, this.select, this.close), this.turns);
    this.offer(chat.models, model);
    this.clear(history, tools);
  }

  offer(models, wanted = this.select.value) {
    const option = (model) => el("option", { value: model.id, selected: model.id === wanted }, model.id);
    const groups = [["Base", models.filter((m) => !m.parent)], ["Adapters", models.filter((m) => m.parent)]];
    this.select.replaceChildren(...groups.filter(([, found]) => found.length).map(([label, found]) => el("optgroup", { label }, ...found.map(option))));
    this.select.disabled = !models.length;
  }

  clear(history = [], tools = null) {
    this.running?.abort();
    this.running = null;
    this.history = history;
    this.tools = tools;
    this.prompts = null; // where they are shown
    if (history.length) this.turns.replaceChildren(el("p", { class: "hint" }, "The conversation so far belongs to this column too."));
    else this.turns.replaceChildren(el("div", { class: "empty" }, el("b", {}, "Ask something"), "Compare puts up to three models side by side.", (this.prompts = el("div", { class: "prompts" }))));
    this.suggest();
  }

  // Prompts of an empty chat.
  suggest() {
    const button = (prompt) => el("button", { type: "button", class: "quiet", onclick: () => this.chat.take(prompt) }, prompt.text, prompt.note ? el("small", {}, prompt.note) : null);
    this.prompts?.replaceChildren(...this.chat.prompts.map(button));
  }

  // Shows a conversation of before a reload.
  restore(history, tools) {
    this.clear(history, tools);
    if (history.length) this.turns.replaceChildren(...history.map(shown));
    this.turns.scrollTop = this.turns.scrollHeight;
  }

  // Sends `messages` after the history; shows `node` and the answer.
  async ask(messages, node) {
    if (!this.history.length) this.turns.querySelector(".empty")?.remove();
    if (node) this.turns.append(node);
    const at = this.history.length;
    let body = null;
    const answer = new Answer({
      retry: () => {
        if (this.running) return;
        while (answer.node.nextSibling) answer.node.nextSibling.remove();
        answer.node.remove();
        this.history.length = at;
        this.ask(messages, null);
      },
      curl: () => showCurl(body),
      results: (results) => this.ask(results, el("p", { class: "hint" }, "Tool results sent")),
    }, this.chat.models.find((model) => model.id === this.select.value)?.max_model_len);
    this.turns.append(answer.node);
    this.turns.scrollTop = this.turns.scrollHeight;
    const running = (this.running = new AbortController());
    this.chat.changed();
    try {
      const system = systemPrompt();
      const sent = [...(system ? [{ role: "system", content: system }] : []), ...this.history, ...messages];
      body = { model: this.select.value, messages: sent, ...(this.tools ? { tools: this.tools } : {}), ...parameters(), stream: true, stream_options: { include_usage: true } };
      for await (const chunk of events(await call(PATH, { body, signal: running.signal }))) answer.take(chunk);
      answer.end();
    } catch (error) {
      const stopped = error.name === "AbortError";
      answer.end({ stopped, error: stopped ? null : error });
    }
    if (!answer.empty && this.running === running) this.history.push(...messages, answer.message);
    if (this.running === running) this.running = null;
    this.chat.changed();
  }
}

export class Chat {
  constructor() {
    this.models = [];
    this.capabilities = [];
    this.prompts = [];
    this.columns = [];
    const kept = conversations();
    for (const { model, history, tools } of kept.length ? kept : [{ history: [] }]) {
      this.add();
      this.columns.at(-1).wanted = model;
      this.columns.at(-1).restore(history, tools);
    }
    this.changed();
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("columns").addEventListener("change", () => this.changed());
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("input", grow);
    $("add-column").addEventListener("click", () => this.add());
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => { this.columns.forEach((column) => column.clear()); this.changed(); $("prompt").focus(); });
    $("chat").addEventListener("keydown", (event) => { if (event.key === "Escape" && this.busy) this.stop(); });
    $("curl-close").addEventListener("click", () => $("curl").close());
    $("curl-copy").addEventListener("click", () => copy($("curl-text").textContent, $("curl-copy")));
  }

  get busy() {
    return this.columns.some((column) => column.running);
  }

  // models: as /v1/models has them
  offer(models) {
    this.models = models;
    for (const column of this.columns) {
      column.offer(models, column.wanted ?? column.select.value);
      if (models.length) column.wanted = undefined;
    }
    this.suggest();
  }

  // capabilities: of the base model, as /api/show has them
  suit(capabilities) {
    this.capabilities = capabilities;
    this.suggest();
  }

  // Drawn again, and the focus lost, only if the prompts have changed.
  suggest() {
    const prompts = this.models.length ? promptsFor(this.models, this.capabilities) : [];
    if (JSON.stringify(prompts) === JSON.stringify(this.prompts)) return;
    this.prompts = prompts;
    for (const column of this.columns) column.suggest();
  }

  // Sends one of `prompts`, with the columns and tools that it needs.
  take({ text, tools, models }) {
    if (models && this.columns.length === 1) this.compare(models);
    if (tools) for (const column of this.columns) column.tools = tools;
    this.send(text);
  }

  add() {
    if (this.columns.length === MOST_COLUMNS) return;
    const shown = new Set(this.columns.map((column) => column.select.value));
    const next = this.models.find((model) => !shown.has(model.id)) ?? this.models[0];
    this.columns.push(new Column(this, next?.id, [...(this.columns[0]?.history ?? [])], this.columns[0]?.tools));
    $("columns").append(this.columns.at(-1).node);
    this.changed();
  }

  // A new chat with a column for each of `models`. Returns false if the user would rather keep the one there is.
  compare(models) {
    if (this.columns.some((column) => column.history.length) && !confirm("This begins a new chat. The conversation in the playground ends.")) return false;
    for (const column of this.columns) column.running?.abort();
    this.columns = models.map((model) => new Column(this, model));
    $("columns").replaceChildren(...this.columns.map((column) => column.node));
    this.changed();
    return true;
  }

  remove(column) {
    column.running?.abort();
    this.columns = this.columns.filter((other) => other !== column);
    column.node.remove();
    this.changed();
    $("prompt").focus();
  }

  send(text = $("prompt").value.trim()) {
    if (!text || this.busy) return;
    if (text === $("prompt").value.trim()) $("prompt").value = "";
    grow();
    for (const column of this.columns) column.ask([{ role: "user", content: text }], el("div", { class: "mine" }, text));
  }

  stop() {
    for (const column of this.columns) column.running?.abort();
    $("prompt").focus();
  }

  changed() {
    $("stop").hidden = !this.busy;
    $("send").hidden = this.busy;
    $("add-column").disabled = this.columns.length === MOST_COLUMNS || this.busy;
    for (const column of this.columns) column.close.hidden = this.columns.length === 1;
    if (!this.busy) keep(this.columns);
  }
}

function keep(columns) {
  const kept = columns.map((column) => ({ model: column.wanted ?? column.select.value, history: column.history, tools: column.tools }));
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(kept));
  } catch {
    sessionStorage.removeItem(KEPT); // more than the browser stores: rather none than half
  }
}

// What `keep` has stored; nothing if it is not there or is another version's.
function conversations() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
    const sound = ({ history }) => Array.isArray(history) && history.every((message) => typeof message.role === "string");
    return Array.isArray(kept) && kept.every(sound) ? kept.slice(0, MOST_COLUMNS) : [];
  } catch {
    return [];
  }
}

// A message of a conversation that is shown again.
function shown({ role, content, tool_calls: calls }) {
  if (role === "user") return el("div", { class: "mine" }, String(content));
  if (role === "tool") return el("p", { class: "hint" }, "Tool results sent");
  const text = el("div", { class: "text" });
  render(text, String(content ?? ""));
  const called = (calls ?? []).map((call) => el("div", { class: "call" }, el("b", {}, String(call.function?.name)), el("pre", { tabindex: "0" }, el("code", {}, String(call.function?.arguments)))));
  return el("article", { class: "answer", "aria-label": "Answer" }, text, ...called);
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function showCurl(body) {
  $("curl-text").textContent = body ? curlOf(PATH, body) : "Nothing was sent.";
  $("curl").showModal();
}
