// The view of adapters: a list for everybody; load, replace and unload for who has the admin key.
import { call, keys } from "./api.js";
import { $, complain, el } from "./dom.js";

const WHERE = { disk: "on disk, read when it is asked for", host: "in host memory", slot: "in a slot, ready" };
const TRAINED = /^(ft:|tinker:)/; // by fine-tuning here: their folders are the server's own

export class Adapters {
  // `changed` is called after a load or an unload.
  constructor(changed) {
    this.changed = changed;
    this.shown = null; // JSON of the list, so that it is drawn, and loses the focus, only if it has changed
    this.models = [];
    $("adapter-form").addEventListener("submit", (event) => { event.preventDefault(); this.load(); });
    $("adapter-replace").addEventListener("change", () => { $("adapter-send").textContent = $("adapter-replace").checked ? "Replace" : "Load"; });
    this.unlock();
  }

  // The admin key has come or gone.
  unlock() {
    $("adapter-panel").hidden = !keys.admin;
    $("adapters-locked").hidden = Boolean(keys.admin);
    this.offer(this.models);
  }

  // models: as /v1/models has them
  offer(models) {
    this.models = models;
    const shown = JSON.stringify([models, Boolean(keys.admin)]);
    if (shown === this.shown) return;
    this.shown = shown;
    const found = models.filter((model) => model.parent);
    $("adapters-base").textContent = models.find((model) => !model.parent)?.id ?? "the base model";
    $("adapters-none").hidden = found.length > 0;
    $("adapter-rows").replaceChildren(...found.map((model) => this.row(model)));
  }

  row(model) {
    const where = (WHERE[model.residency] ?? "not known") + (model.pinned ? ", pinned" : "");
    const button = (label, act) => el("button", { type: "button", class: "quiet tiny", "aria-label": `${label} ${model.id}`, onclick: act }, label);
    const actions = el("div", { class: "actions" }, button("Replace", () => this.fill(model)), button("Unload", () => this.unload(model)));
    const last = keys.admin && !TRAINED.test(model.id) ? actions : "";
    return el("tr", {}, el("td", {}, model.id), el("td", {}, where), el("td", {}, el("code", {}, String(model.root))), el("td", {}, last));
  }

  // Fills the form in for a newer version. The folder as the server knows it: with keys, /v1/models has its name alone.
  async fill(model) {
    await this.act(`Looking up ${model.id}`, async () => {
      const loaded = await (await call("lora-adapters", { admin: true })).json();
      $("adapter-name").value = model.id;
      $("adapter-path").value = loaded.find((each) => each.name === model.id)?.path ?? "";
      $("adapter-pinned").checked = model.pinned === true;
      $("adapter-replace").checked = true;
      $("adapter-send").textContent = "Replace";
      return "";
    });
    $("adapter-path").focus();
  }

  load() {
    const name = $("adapter-name").value.trim();
    const body = { lora_name: name, lora_path: $("adapter-path").value.trim(), replace: $("adapter-replace").checked, pinned: $("adapter-pinned").checked };
    if ($("adapter-scaling").value) body.expert_scaling = $("adapter-scaling").value;
    if ($("adapter-layout").value) body.expert_b_layout = $("adapter-layout").value;
    return this.act(`Loading ${name}`, async () => {
      const made = await (await call("v1/load_lora_adapter", { body, admin: true })).json();
      const warnings = made.warnings.length ? ` Warnings: ${made.warnings.join("; ")}` : "";
      return `${made.id}, version ${made.version}, is loaded: rank ${made.rank}, ${(made.num_bytes / 1e6).toFixed(1)} MB.${warnings}`;
    });
  }

  async unload(model) {
    if (!confirm(`Unload ${model.id}? New requests for it are refused, running ones end normally.`)) return;
    await this.act(`Unloading ${model.id}`, async () => {
      await call("v1/unload_lora_adapter", { body: { lora_name: model.id }, admin: true });
      return `${model.id} is unloaded.`;
    });
  }

  // Runs `work`, one at a time; says what it returns, or why it failed.
  async act(doing, work) {
    if ($("adapter-send").disabled) return;
    $("adapter-send").disabled = true;
    $("adapter-status").textContent = `${doing} …`;
    complain($("adapters-note"), null);
    let said = "";
    try {
      said = await work();
    } catch (error) {
      complain($("adapters-note"), error);
    }
    $("adapter-status").textContent = said;
    $("adapter-send").disabled = false;
    this.changed();
  }
}
