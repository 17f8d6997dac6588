// One answer: takes a stream's chunks, shows reasoning, text, tool calls, token probabilities and how fast it was.
import { copy, el } from "./dom.js";
import { render } from "./markdown.js";
import { TokenView } from "./tokens.js";

const MEASURABLE_MS = 50; // what comes at once, such as a tool call, has no rate
const WHY = { length: "cut off at max tokens", content_filter: "filtered" };

export class Answer {
  // actions: { retry, curl, results } are called with nothing, nothing, and the tool messages.
  constructor(actions, context = null) {
    this.actions = actions;
    this.context = context; // tokens that the model's context has, if that is known
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.usage = null;
    this.finish = null;
    this.began = performance.now();
    this.first = this.last = null;
    this.tokens = null; // a TokenView once probabilities have come
    this.reasoningText = el("div");
    this.reasoningNode = el("details", { class: "reasoning", open: true, hidden: true }, el("summary", {}, "Reasoning"), this.reasoningText);
    this.text = el("div", { class: "text" });
    this.callsNode = el("div");
    this.numbers = el("span", { class: "numbers" });
    this.foot = el("div", { class: "foot" }, this.numbers);
    this.node = el("article", { class: "answer working", "aria-busy": "true", "aria-label": "Answer" }, this.reasoningNode, this.text, this.callsNode, this.foot);
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const delta = choice.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    if (typeof delta.reasoning_content === "string") this.reasoning += delta.reasoning_content;
    if (typeof delta.content === "string") this.content += delta.content;
    for (const part of delta.tool_calls ?? []) this.takeCall(part);
    if (choice.logprobs?.content?.length) this.takeTokens(choice.logprobs.content);
    this.paintSoon();
  }

  takeCall(part) {
    const call = (this.calls[part.index ?? this.calls.length] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id = part.id ?? call.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }

  takeTokens(entries) {
    if (!this.tokens) {
      this.tokens = new TokenView();
      this.text.after(this.tokens.node);
      this.text.hidden = true;
    }
    this.tokens.add(entries);
  }

  // At most once a frame, however fast tokens come.
  paintSoon() {
    this.painting ??= requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.painting);
    this.painting = undefined;
    const turns = this.node.parentElement;
    const atEnd = turns && turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
    if (this.reasoning) {
      this.reasoningNode.hidden = false;
      this.reasoningText.textContent = this.reasoning;
    }
    render(this.text, this.content);
    this.callsNode.replaceChildren(...this.calls.map((call) => el("div", { class: "call" }, el("b", {}, call.function.name || "…"), el("pre", { tabindex: "0" }, el("code", {}, call.function.arguments)))));
    this.numbers.textContent = this.summary();
    if (atEnd) turns.scrollTop = turns.scrollHeight;
  }

  summary() {
    const parts = [];
    const seconds = (time) => `${((time - this.began) / 1000).toFixed(2)} s`;
    if (this.usage && this.last !== null) {
      const { completion_tokens: count, prompt_tokens: before } = this.usage;
      parts.push(`${count} tokens in ${seconds(this.last)}`);
      if (count > 1 && this.last - this.first >= MEASURABLE_MS) parts.push(`${((1000 * (count - 1)) / (this.last - this.first)).toFixed(1)} tokens/s`);
      parts.push(`context ${before + count}${this.context ? ` of ${this.context}` : ""}`);
    }
    if (this.first !== null) parts.push(`first after ${seconds(this.first)}`);
    if (WHY[this.finish]) parts.push(WHY[this.finish]);
    if (this.stopped) parts.push("stopped");
    return parts.join(" · ");
  }

  // error: a ServerError, or null.
  end({ error = null, stopped = false } = {}) {
    this.stopped = stopped;
    this.paint();
    this.node.classList.remove("working");
    this.node.removeAttribute("aria-busy");
    if (this.reasoning && this.content) this.reasoningNode.open = false;
    if (error) this.foot.before(el("div", { class: "error", role: "alert" }, error.message, error.detail ? el("small", {}, error.detail) : null));
    const button = (label, act) => {
      const made = el("button", { type: "button", class: "quiet tiny", onclick: () => act(made) }, label);
      return made;
    };
    this.foot.append(el("span", { class: "buttons" },
      this.tokens && button("Text", (made) => this.toggle(made)),
      this.content ? button("Copy", (made) => copy(this.content, made)) : null,
      button("curl", this.actions.curl),
      button("Retry", this.actions.retry),
    ));
    if (error || stopped) this.calls = []; // half of a call is none
    if (this.calls.length) this.askForResults();
  }

  toggle(button) {
    this.text.hidden = !this.text.hidden;
    this.tokens.node.hidden = !this.text.hidden;
    button.textContent = this.text.hidden ? "Text" : "Tokens";
  }

  // The caller of tools is whoever sits before the page.
  askForResults() {
    const fields = this.calls.map((call, i) => {
      const field = el("textarea", { rows: "1", class: "code" });
      this.callsNode.children[i].append(el("label", {}, `Result of ${call.function.name}`, field));
      return field;
    });
    const send = el("button", { type: "button", onclick: () => {
      send.disabled = true;
      this.actions.results(this.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: fields[i].value })));
    } }, this.calls.length > 1 ? "Send results" : "Send result");
    this.callsNode.append(send);
  }

  get message() {
    const message = { role: "assistant", content: this.content };
    return this.calls.length ? { ...message, tool_calls: this.calls } : message;
  }

  get empty() {
    return !this.content && !this.calls.length;
  }
}
