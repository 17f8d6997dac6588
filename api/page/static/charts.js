// Two drawings on canvases, in the theme's colours: a line over time and a heat map of experts by layer.

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A canvas's context, as many pixels as it is wide on the screen.
export function sized(canvas, height) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width];
}

// points: [seconds, value], oldest first; the newest is at the right edge.
export function lineChart(canvas, points, seconds) {
  const height = 36;
  const [context, width] = sized(canvas, height);
  if (points.length < 2) return;
  const most = Math.max(...points.map(([, value]) => value)) || 1;
  const end = points.at(-1)[0];
  const x = (time) => width - ((end - time) / seconds) * width;
  const y = (value) => height - 2 - (value / most) * (height - 6);
  context.beginPath();
  for (const [time, value] of points) context.lineTo(x(time), y(value));
  context.strokeStyle = colour("--accent");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(x(points[0][0]), height);
  context.fillStyle = `rgb(${colour("--heat")} / 15%)`;
  context.fill();
}

export class ExpertMap {
  constructor(canvas, text) {
    this.canvas = canvas;
    this.text = text;
    this.layers = []; // [layer, [choices by expert]]
    this.at = null; // [row, expert] under the pointer or chosen by keys
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("click", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => { this.at = null; this.draw(); });
    canvas.addEventListener("keydown", (event) => this.move(event));
    canvas.addEventListener("blur", () => { this.at = null; this.draw(); });
  }

  show(layers) {
    this.layers = layers;
    if (this.at && !layers[this.at[0]]) this.at = null;
    this.draw();
  }

  get experts() {
    return Math.max(0, ...this.layers.map(([, counts]) => counts.length));
  }

  point(event) {
    const row = Math.floor((event.offsetY / this.canvas.clientHeight) * this.layers.length);
    const expert = Math.floor((event.offsetX / this.canvas.clientWidth) * this.experts);
    this.at = this.layers[row]?.[1][expert] === undefined ? null : [row, expert];
    this.draw();
  }

  move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.layers.length) return;
    event.preventDefault();
    const [row, expert] = this.at ?? [0, -step[1]];
    this.at = [
      Math.max(0, Math.min(this.layers.length - 1, row + step[0])),
      Math.max(0, Math.min(this.experts - 1, expert + step[1])),
    ];
    this.draw();
  }

  // A cell's strength is its share of its layer's choices, the layer's strongest being full.
  draw() {
    const { layers, experts } = this;
    const cell = Math.max(4, Math.min(18, 560 / Math.max(1, layers.length)));
    const height = Math.max(1, layers.length) * cell;
    this.canvas.style.height = `${height}px`;
    const [context, width] = sized(this.canvas, height);
    const heat = colour("--heat");
    const w = width / Math.max(1, experts);
    context.fillStyle = colour("--raised");
    context.fillRect(0, 0, width, height);
    layers.forEach(([, counts], row) => {
      const most = Math.max(1, ...counts);
      counts.forEach((count, expert) => {
        if (!count) return;
        context.fillStyle = `rgb(${heat} / ${(0.08 + 0.92 * (count / most)).toFixed(3)})`;
        context.fillRect(expert * w, row * cell, w > 4 ? w - 1 : w, cell > 4 ? cell - 1 : cell);
      });
    });
    if (this.at) {
      context.strokeStyle = colour("--text");
      context.lineWidth = 2;
      context.strokeRect(this.at[1] * w, this.at[0] * cell, w, cell);
    }
    this.text.textContent = this.words();
  }

  words() {
    if (!this.layers.length) return "The backend that computes the experts here does not count them.";
    const sums = this.layers.map(([, counts]) => counts.reduce((a, b) => a + b, 0));
    const total = sums.reduce((a, b) => a + b, 0);
    if (this.at) {
      const [row, expert] = this.at;
      const count = this.layers[row][1][expert];
      const share = sums[row] ? (100 * count) / sums[row] : 0;
      return `Layer ${this.layers[row][0]}, expert ${expert}: ${count.toLocaleString("en")} of ${sums[row].toLocaleString("en")} choices, ${share.toFixed(1)} % (even: ${(100 / this.experts).toFixed(1)} %)`;
    }
    const touched = this.layers.reduce((all, [, counts]) => all + counts.filter(Boolean).length, 0);
    return `${this.layers.length} layers of ${this.experts} experts; ${total.toLocaleString("en")} choices went to ${touched} of ${this.layers.length * this.experts} experts. Rows are layers, columns experts; a row's strongest is full.`;
  }
}
