// A canvas with a job's losses over its steps. Pointer, or arrow keys, tell a step's numbers.
import { colour, sized } from "./charts.js";

const HEIGHT = 200;
const LEFT = 44;
const BOTTOM = 20;
const NAMES = { train_loss: "training", valid_loss: "validation", full_valid_loss: "whole validation file" };

export class LossChart {
  constructor(canvas, text) {
    this.canvas = canvas;
    this.text = text;
    this.steps = []; // as events have them, by step
    this.at = null; // an index of `steps`
    canvas.addEventListener("mousemove", (event) => this.point(event.offsetX));
    canvas.addEventListener("click", (event) => this.point(event.offsetX));
    for (const kind of ["mouseleave", "blur"]) canvas.addEventListener(kind, () => { this.at = null; this.draw(); });
    canvas.addEventListener("keydown", (event) => this.move(event));
    addEventListener("resize", () => this.draw());
  }

  show(steps) {
    this.steps = steps;
    if (this.at >= steps.length) this.at = null;
    this.draw();
  }

  point(x) {
    if (!this.steps.length) return;
    const step = this.first + ((x - LEFT) / (this.canvas.clientWidth - LEFT - 8)) * (this.last - this.first);
    const distance = (i) => Math.abs(this.steps[i].step - step);
    this.at = this.steps.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
    this.draw();
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !this.steps.length) return;
    event.preventDefault();
    const from = this.at ?? (step > 0 ? -1 : this.steps.length);
    this.at = Math.max(0, Math.min(this.steps.length - 1, from + step));
    this.draw();
  }

  get first() {
    return this.steps[0]?.step ?? 0;
  }

  get last() {
    return this.steps.at(-1)?.step ?? 0;
  }

  draw() {
    const [context, width] = sized(this.canvas, HEIGHT);
    this.text.textContent = this.words();
    if (!this.steps.length) return;
    const values = this.steps.flatMap((each) => Object.keys(NAMES).map((name) => each[name])).filter(Number.isFinite);
    const most = Math.max(...[0, ...values].filter(Number.isFinite)) || 1;
    const x = (step) => LEFT + ((step - this.first) / Math.max(1, this.last - this.first)) * (width - LEFT - 8);
    const y = (loss) => 8 + (1 - loss / most) * (HEIGHT - BOTTOM - 8);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("--dim");
    context.strokeStyle = colour("--line");
    context.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const at = Math.round(y(share * most)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width, at);
      context.stroke();
      context.textAlign = "right";
      context.fillText((share * most).toPrecision(3), LEFT - 6, at + 4);
    }
    context.textAlign = "left";
    context.fillText(String(this.first), LEFT, HEIGHT - 4);
    context.textAlign = "right";
    if (this.last > this.first) context.fillText(String(this.last), width - 8, HEIGHT - 4);
    this.line(context, "train_loss", colour("--accent"), x, y);
    this.line(context, "valid_loss", colour("--second"), x, y);
    context.fillStyle = colour("--second");
    for (const each of this.steps.filter((found) => Number.isFinite(found.full_valid_loss))) {
      context.beginPath();
      context.arc(x(each.step), y(each.full_valid_loss), 4, 0, 2 * Math.PI);
      context.fill();
    }
    if (this.at === null) return;
    context.strokeStyle = colour("--text");
    context.beginPath();
    context.moveTo(x(this.steps[this.at].step), 8);
    context.lineTo(x(this.steps[this.at].step), HEIGHT - BOTTOM);
    context.stroke();
  }

  line(context, name, stroke, x, y) {
    const points = this.steps.filter((each) => Number.isFinite(each[name]));
    context.beginPath();
    for (const each of points) context.lineTo(x(each.step), y(each[name]));
    if (points.length === 1) context.lineTo(x(points[0].step) + 1, y(points[0][name]));
    context.strokeStyle = stroke;
    context.lineWidth = 1.5;
    context.stroke();
  }

  words() {
    if (!this.steps.length) return "No step has been trained yet.";
    const each = this.steps[this.at ?? this.steps.length - 1];
    const losses = Object.entries(NAMES).filter(([name]) => Number.isFinite(each[name])).map(([name, words]) => `${words} ${each[name].toFixed(4)}`);
    const accuracy = Number.isFinite(each.train_mean_token_accuracy) ? [`${(100 * each.train_mean_token_accuracy).toFixed(1)} % of training tokens right`] : [];
    return `Step ${each.step}: ${[...losses, ...accuracy].join(", ")}`;
  }
}
