// A view that asks the server again and again while it is shown, and the page is.

import { $ } from "./dom.js";

// `id`: of the view's element. `look` is each view's own: it asks with `this.asking.signal` and sets `this.timer`.
export class Watched {
  constructor(id) {
    this.timer = null;
    this.asking = null; // an AbortController
    document.addEventListener("visibilitychange", () => this.watch(!$(id).hidden));
  }

  watch(wanted) {
    clearTimeout(this.timer);
    this.asking?.abort();
    if (wanted && !document.hidden) this.look();
  }
}
