// An answer as its tokens, each shaded by how unlikely it was, with the alternatives on hover, focus or tap.
import { $, el } from "./dom.js";

const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : `${(100 * p).toPrecision(2)} %`);

export class TokenView {
  constructor() {
    this.node = el("div", {
      class: "tokens", role: "group", "aria-label": "Tokens; arrow keys move between them",
      onmouseover: (e) => this.show(e.target), onmouseout: () => this.hide(),
      onfocusin: (e) => this.show(e.target), onfocusout: () => this.hide(), onkeydown: (e) => this.move(e),
    });
    this.entries = new Map(); // by element
  }

  // entries: of `logprobs.content`
  add(entries) {
    for (const entry of entries) {
      const p = Math.exp(entry.logprob);
      const span = el("span", { tabindex: this.entries.size ? "-1" : "0", "aria-label": `${visible(entry.token)}, ${percent(p)}`, role: "button" }, entry.token);
      span.style.setProperty("--doubt", (1 - p).toFixed(3));
      this.entries.set(span, entry);
      this.node.append(span);
    }
  }

  show(span) {
    const entry = this.entries.get(span);
    if (!entry) return;
    const card = $("token-card");
    const top = entry.top_logprobs?.length ? entry.top_logprobs : [];
    const rows = top.some((other) => other.token === entry.token) ? top : [entry, ...top];
    card.replaceChildren(...rows.map((other) => {
      const p = Math.exp(other.logprob);
      const row = el("div", { class: other.token === entry.token ? "chosen" : null }, el("code", {}, visible(other.token)), el("span", {}, percent(p)));
      row.style.setProperty("--share", Math.min(1, p).toFixed(4));
      return row;
    }));
    card.hidden = false;
    span.setAttribute("aria-describedby", "token-card");
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const below = at.bottom + 6 + card.offsetHeight < innerHeight;
    card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - card.offsetWidth - 8))}px`;
    card.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - 6 - card.offsetHeight)}px`;
  }

  hide() {
    $("token-card").hidden = true;
  }

  move(event) {
    const all = [...this.entries.keys()];
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -all.length, End: all.length }[event.key];
    const from = all.indexOf(document.activeElement);
    if (!step || from < 0) return;
    event.preventDefault();
    const to = all[Math.max(0, Math.min(all.length - 1, from + step))];
    all[from].tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}
