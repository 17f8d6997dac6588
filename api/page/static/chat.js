// The playground: one to three columns, each a model and its own conversation; a message goes to all of them.
import { Answer } from "./answer.js";
import { call, curlOf, events } from "./api.js";
import { $, copy, el } from "./dom.js";
import { parameters, systemPrompt } from "./settings.js";

const MOST_COLUMNS = 3;
const PATH = "v1/chat/completions";

class Column {
  constructor(chat, model, history = []) {
    this.chat = chat;
    this.history = history; // messages that have been answered, and their answers
    this.running = null; // an AbortController
    this.select = el("select", { "aria-label": "Model or adapter" });
    this.close = el("button", { type: "button", class: "quiet tiny", "aria-label": "Close this column", onclick: () => chat.remove(this) }, "✕");
    this.turns = el("div", { class: "turns", role: "log", tabindex: "0", "aria-label": "Conversation" });
    this.node = el("section", { class: "column" }, el("header", {}, this.select, this.close), this.turns);
    this.offer(chat.models, model);
    this.clear(history);
  }

  offer(models, wanted = this.select.value) {
    const option = (model) => el("option", { value: model.id, selected: model.id === wanted }, model.id);
    const groups = [["Base", models.filter((m) => !m.parent)], ["Adapters", models.filter((m) => m.parent)]];
    this.select.replaceChildren(...groups.filter(([, found]) => found.length).map(([label, found]) => el("optgroup", { label }, ...found.map(option))));
    this.select.disabled = !models.length;
  }

  clear(history = []) {
    this.running?.abort();
    this.running = null;
    this.history = history;
    const shown = history.length ? el("p", { class: "hint" }, "The conversation so far belongs to this column too.") : el("div", { class: "empty" }, el("b", {}, "Ask something"), "Compare puts up to three models side by side.");
    this.turns.replaceChildren(shown);
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
    });
    this.turns.append(answer.node);
    this.turns.scrollTop = this.turns.scrollHeight;
    const running = (this.running = new AbortController());
    this.chat.changed();
    try {
      const system = systemPrompt();
      const sent = [...(system ? [{ role: "system", content: system }] : []), ...this.history, ...messages];
      body = { model: this.select.value, messages: sent, ...parameters(), stream: true, stream_options: { include_usage: true } };
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
    this.columns = [];
    this.add();
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
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
    for (const column of this.columns) column.offer(models);
  }

  add() {
    if (this.columns.length === MOST_COLUMNS) return;
    const shown = new Set(this.columns.map((column) => column.select.value));
    const next = this.models.find((model) => !shown.has(model.id)) ?? this.models[0];
    this.columns.push(new Column(this, next?.id, [...(this.columns[0]?.history ?? [])]));
    $("columns").append(this.columns.at(-1).node);
    this.changed();
  }

  remove(column) {
    column.running?.abort();
    this.columns = this.columns.filter((other) => other !== column);
    column.node.remove();
    this.changed();
    $("prompt").focus();
  }

  send() {
    const text = $("prompt").value.trim();
    if (!text || this.busy) return;
    $("prompt").value = "";
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
  }
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
