// The view of fine-tuning: the caller's jobs, and of one of them its losses, events and checkpoints.
import { call } from "./api.js";
import { $, complain, el } from "./dom.js";
import { LossChart } from "./losses.js";
import { Watched } from "./watch.js";

const JOBS = "v1/fine_tuning/jobs";
const EVERY_MS = 2000;
const PAGE = 50; // jobs
const EVENTS = 1000; // of one answer, the most that the server gives
const MOST_EVENTS = 20 * EVENTS; // that are fetched of a job
const SHOWN = 200; // events in the list
const MAY = { // what can be done with a job, by its status
  validating_files: ["pause", "cancel"], queued: ["pause", "cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"],
};
const PANELS = ["job-panel", "loss-panel", "checkpoint-panel", "event-panel"];
const LABELS = { pause: "Pause", resume: "Resume", cancel: "Cancel" };
const WORDS = { validating_files: "checking files" };
const time = (seconds) => new Date(1000 * seconds).toLocaleString();
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();
const nameOf = (job) => job.user_provided_suffix ?? job.id;
const statusOf = (job) => WORDS[job.status] ?? job.status;

export class Tuning extends Watched {
  // `compare` is called with names of models that are to be asked side by side.
  constructor(compare) {
    super("tuning");
    this.compare = compare;
    this.pages = 1; // of jobs
    this.chosen = null; // a job's id
    this.events = []; // of the chosen job, newest first
    this.drawn = {}; // JSON of what is shown, by place: nothing is drawn again, or loses the focus, that has not changed
    this.chart = new LossChart($("losses"), $("loss-text"));
    $("jobs-more").addEventListener("click", () => { this.pages += 1; this.watch(true); });
  }

  async look() {
    const asking = (this.asking = new AbortController());
    const { signal } = asking;
    try {
      const [jobs, more] = await this.jobs(signal);
      this.showJobs(jobs, more);
      this.chosen ??= jobs[0]?.id ?? null;
      if (this.chosen) await this.lookAt(this.chosen, signal);
      if (signal.aborted) return;
      complain($("tuning-note"), null);
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return;
      if (error.code === "no_fine_tuning") this.showOff(error.detail);
      else complain($("tuning-note"), error);
    }
    this.timer = setTimeout(() => this.look(), EVERY_MS);
  }

  async jobs(signal) {
    const found = [];
    for (let page = 1; ; page += 1) {
      const after = found.length ? `&after=${encodeURIComponent(found.at(-1).id)}` : "";
      const { data, has_more: more } = await (await call(`${JOBS}?limit=${PAGE}${after}`, { signal })).json();
      found.push(...data);
      if (!more || page === this.pages) return [found, more];
    }
  }

  async lookAt(id, signal) {
    const path = `${JOBS}/${encodeURIComponent(id)}`;
    const job = await (await call(path, { signal })).json();
    const events = await this.newer(path, signal);
    const checkpoints = (await (await call(`${path}/checkpoints?limit=100`, { signal })).json()).data;
    if (signal.aborted || id !== this.chosen) return;
    this.events = events;
    this.showJob(job);
    this.showCheckpoints(job, checkpoints);
    this.showEvents();
  }

  // The events that are there, with those that are new, newest first.
  async newer(path, signal) {
    const known = this.events[0]?.id;
    const found = [];
    for (;;) {
      const after = found.length ? `&after=${encodeURIComponent(found.at(-1).id)}` : "";
      const { data, has_more: more } = await (await call(`${path}/events?limit=${known && !found.length ? 20 : EVENTS}${after}`, { signal })).json();
      const at = data.findIndex((event) => event.id === known);
      found.push(...(at < 0 ? data : data.slice(0, at)));
      if (at >= 0) return [...found, ...this.events];
      if (!more || found.length >= MOST_EVENTS) return found;
    }
  }

  changed(place, value) {
    const shown = JSON.stringify(value);
    if (this.drawn[place] === shown) return false;
    this.drawn[place] = shown;
    return true;
  }

  showOff(reason) {
    $("jobs-none").textContent = `No jobs here: ${reason}`;
    $("jobs-none").hidden = false;
  }

  showJobs(jobs, more) {
    $("jobs-none").textContent = "No job has been created with this key. POST /v1/fine_tuning/jobs, or OpenAI's client, creates one.";
    $("jobs-none").hidden = jobs.length > 0;
    $("jobs-more").hidden = !more;
    const chosen = this.chosen ?? jobs[0]?.id;
    if (!this.changed("jobs", [jobs, chosen])) return;
    const focused = document.activeElement.dataset.job;
    $("job-rows").replaceChildren(...jobs.map((job) => {
      const open = el("button", { type: "button", class: "quiet tiny", "data-job": job.id, title: job.id, onclick: () => this.choose(job.id) }, nameOf(job));
      const cells = [open, statusOf(job), job.method?.type ?? "", job.fine_tuned_model ?? job.model, time(job.created_at)];
      return el("tr", { "aria-current": job.id === chosen && "true" }, ...cells.map((cell) => el("td", {}, cell)));
    }));
    if (focused) [...$("job-rows").querySelectorAll("button")].find((button) => button.dataset.job === focused)?.focus();
  }

  // Another key: other jobs.
  forget() {
    this.pages = 1;
    this.choose(null);
    for (const id of PANELS) $(id).hidden = true;
    $("job-rows").replaceChildren();
    this.drawn = {};
  }

  choose(id) {
    this.chosen = id;
    this.events = [];
    this.watch(!$("tuning").hidden);
  }

  showJob(job) {
    for (const id of PANELS) $(id).hidden = false;
    if (!this.changed("job", job)) return;
    $("job-name").textContent = `${nameOf(job)}: ${statusOf(job)}`;
    $("job-actions").replaceChildren(...(MAY[job.status] ?? []).map((act) => el("button", { type: "button", class: "quiet", onclick: () => this.move(job, act) }, LABELS[act])));
    const values = Object.entries(job.method?.[job.method.type]?.hyperparameters ?? {}).map(([name, value]) => `${name} ${value}`);
    const facts = [
      ["Job", job.id],
      ["Base", job.model],
      ["Model", job.fine_tuned_model],
      ["Hyperparameters", values.join(", ")],
      ["Seed", job.seed],
      ["Metadata", job.metadata && Object.entries(job.metadata).map(([name, value]) => `${name}=${value}`).join(", ")],
      ["Trained tokens", job.trained_tokens?.toLocaleString("en")],
      ["Ends about", job.estimated_finish && time(job.estimated_finish)],
      ["Ended", job.finished_at && time(job.finished_at)],
      ["Error", job.error?.message],
    ];
    const known = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
    $("job-facts").replaceChildren(...known.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
  }

  async move(job, act) {
    if (act === "cancel" && !confirm(`Cancel ${nameOf(job)}? A cancelled job cannot be resumed; its checkpoints stay.`)) return;
    for (const button of $("job-actions").children) button.disabled = true;
    try {
      await call(`${JOBS}/${encodeURIComponent(job.id)}/${act}`, { method: "POST" });
      this.watch(true);
    } catch (error) {
      complain($("tuning-note"), error);
      for (const button of $("job-actions").children) button.disabled = false;
    }
  }

  showCheckpoints(job, checkpoints) {
    if (!this.changed("checkpoints", [job.id, checkpoints])) return;
    $("checkpoints").replaceChildren(...checkpoints.map((each) => {
      const { fine_tuned_model_checkpoint: model, step_number: step, metrics } = each;
      const loss = metrics.full_valid_loss ?? metrics.train_loss;
      const words = `${metrics.full_valid_loss === undefined ? "training" : "validation"} loss ${loss?.toFixed(4)}`;
      const chat = el("button", { type: "button", class: "tiny", "aria-label": `Chat with ${model} beside the base`, onclick: () => this.compare([job.model, model]) }, "Chat beside the base");
      return el("div", {}, el("small", {}, `step ${step}`), el("span", { class: "grow" }, model, el("br"), el("small", {}, words)), chat);
    }));
    if (!checkpoints.length) $("checkpoints").append(el("p", { class: "hint" }, "None yet: the ends of the last three epochs are kept."));
  }

  showEvents() {
    if (!this.changed("events", [this.chosen, this.events.length, this.events[0]?.id])) return;
    const steps = new Map(); // a step that was computed again counts once, its newest event
    for (const event of [...this.events].reverse()) if (event.type === "metrics") steps.set(event.data.step, event.data);
    this.chart.show([...steps.values()].sort((a, b) => a.step - b.step));
    const shown = this.events.slice(0, SHOWN);
    $("events-text").textContent = shown.length < this.events.length ? `the newest ${shown.length} of ${this.events.length}` : "";
    const kinds = { error: "grow bad", warn: "grow warn" };
    $("events").replaceChildren(...shown.map((event) => el("li", {}, el("small", { title: time(event.created_at) }, clock(event.created_at)), el("span", { class: kinds[event.level] ?? "grow" }, event.message))));
  }
}
