// The live view: asks /v1/live once a second while it is seen, and shows differences between answers.
import { call } from "./api.js";
import { $, complain, el } from "./dom.js";
import { ExpertMap, lineChart } from "./charts.js";
import { showPlan, showRoof } from "./plan.js";
import { Watched } from "./watch.js";

const EVERY_MS = 1000;
const RECENT_S = 10;
const KEPT_S = 120;
const RATES = [["decode", "decode_tokens", 1], ["prefill", "prefill_tokens", 1], ["bytes", "weight_bytes_read", 1e-9], ["step", "steps", 1]];
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const number = new Intl.NumberFormat("en");

export class Live extends Watched {
  constructor() {
    super("live");
    this.samples = []; // oldest first
    this.planned = false; // whether the engine's plan is shown
    this.map = new ExpertMap($("experts"), $("expert-text"));
    for (const radio of document.querySelectorAll('[name="period"]')) radio.addEventListener("change", () => this.showExperts());
  }

  async look() {
    const asking = (this.asking = new AbortController());
    try {
      const { live } = await (await call("v1/live", { admin: true, signal: asking.signal })).json();
      this.take(live);
      if (!this.planned) showPlan(await (await call("v1/plan", { admin: true, signal: asking.signal })).json());
      this.planned = true;
      complain($("live-note"), null);
    } catch (error) {
      if (error.name === "AbortError") return;
      complain($("live-note"), error);
    }
    this.timer = setTimeout(() => this.look(), EVERY_MS);
  }

  take(live) {
    const last = this.samples.at(-1);
    if (last && (live.time_s <= last.time_s || live.steps < last.steps)) { // another engine
      this.samples = [];
      this.planned = false;
    }
    this.samples.push(live);
    while (live.time_s - this.samples[0].time_s > KEPT_S) this.samples.shift();
    this.showRates();
    this.showBlocks(live);
    this.showTenants(live);
    this.showRows(live);
    this.showExperts();
  }

  get recent() {
    const now = this.samples.at(-1);
    return this.samples.find((sample) => now.time_s - sample.time_s <= RECENT_S) ?? now;
  }

  showRates() {
    for (const [id, counter, unit] of RATES) {
      const rates = this.samples.slice(1).map((now, i) => {
        const before = this.samples[i];
        return [now.time_s, (unit * (now[counter] - before[counter])) / (now.time_s - before.time_s)];
      });
      const counted = this.samples.at(-1)[counter] !== null;
      $(`${id}-rate`).textContent = counted && rates.length ? short.format(rates.at(-1)[1]) : "–";
      lineChart($(`${id}-line`), counted ? rates : [], KEPT_S);
      if (id === "bytes") this.showShare(counted ? rates.map(([, rate]) => rate) : []);
    }
  }

  // gigabytes: a second, oldest first; none if they are not counted
  showShare(gigabytes) {
    const live = this.samples.at(-1);
    const peak = live.read_bandwidth;
    const known = gigabytes.length && peak;
    $("bytes-share").textContent = known ? `${((1e11 * gigabytes.at(-1)) / peak).toFixed(0)} % of ${short.format(1e-9 * peak)}` : "";
    const before = this.samples.at(-2);
    const steps = before ? live.steps - before.steps : 0;
    showRoof(gigabytes, peak && 1e-9 * peak, steps ? (1e-9 * (live.weight_bytes_read - before.weight_bytes_read)) / steps : null);
  }

  showBlocks(live) {
    const share = (name, count) => {
      const bar = el("i", { class: name });
      bar.style.setProperty("--share", count / live.blocks_total);
      return bar;
    };
    $("blocks").replaceChildren(share("used", live.blocks_used), share("cached", live.blocks_cached));
    const free = live.blocks_total - live.blocks_used - live.blocks_cached;
    const text = [["used", `${number.format(live.blocks_used)} in use`], ["cached", `${number.format(live.blocks_cached)} cached`], ["", `${number.format(free)} empty`]];
    $("blocks-text").replaceChildren(...text.flatMap(([name, words]) => [el("span", { class: `key ${name}` }), words]), ` · of ${number.format(live.blocks_total)}, ${live.block_tokens} tokens each`);
    $("blocks").setAttribute("aria-label", `KV blocks: ${text.map(([, words]) => words).join(", ")}`);
  }

  showTenants(live) {
    const before = this.recent.tenant_service;
    const service = Object.entries(live.tenant_service).map(([name, total]) => [name, Math.max(0, total - (before[name] ?? 0))]);
    const running = (name) => live.rows.filter((row) => row.tenant === name).length;
    const active = service.filter(([name, recent]) => recent > 0 || running(name)).sort((a, b) => b[1] - a[1]).slice(0, 20);
    const sum = active.reduce((total, [, recent]) => total + recent, 0);
    $("tenants").replaceChildren(...active.flatMap(([name, recent]) => {
      const share = sum ? recent / sum : 0;
      const bar = el("i");
      bar.style.setProperty("--share", share);
      return [el("span", { title: name }, name), bar, el("small", {}, `${(100 * share).toFixed(0)} %, ${running(name)} running`)];
    }));
    if (!active.length) $("tenants").append(el("small", {}, "Nobody was served."));
  }

  showRows(live) {
    $("rows-text").textContent = `${live.rows.length} running, ${live.waiting} waiting`;
    $("rows").replaceChildren(...live.rows.map((row) => {
      const phase = row.output_tokens ? "decode" : `prefill ${Math.floor((100 * Math.min(row.computed_tokens, row.prompt_tokens)) / row.prompt_tokens)} %`;
      const cached = row.cached_tokens ? ` (${number.format(row.cached_tokens)} cached)` : "";
      const cells = [row.request_id.slice(0, 8), row.adapter ?? "base", row.tenant, phase, number.format(row.prompt_tokens) + cached, `${number.format(row.output_tokens)} / ${number.format(row.max_tokens)}`, row.blocks];
      return el("tr", {}, ...cells.map((cell) => el("td", {}, String(cell))));
    }));
  }

  showExperts() {
    const now = this.samples.at(-1);
    if (!now) return;
    const since = document.querySelector('[name="period"]:checked').value === "recent" ? this.recent : null;
    const before = since?.expert_choices ?? {};
    this.map.show(Object.entries(now.expert_choices).map(([layer, counts]) => [Number(layer), counts.map((count, e) => count - (before[layer]?.[e] ?? 0))]));
    const layers = now.expert_layers - (since?.expert_layers ?? 0);
    const touched = now.experts_touched - (since?.experts_touched ?? 0);
    $("touched-text").textContent = layers ? `A step touches ${(touched / layers).toFixed(1)} experts of a layer on average.` : "";
  }
}
