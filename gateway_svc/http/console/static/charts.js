// Line charts of the last two minutes or of an hour, and rates and quantiles from the differences of counters.

import { colour, decode, prepare } from "./draw.js";

const WINDOW_S = 120;
const LEAST_WINDOW_S = 20;
const RATE_S = 2;
const QUANTILE_S = 30;
const SAMPLE_S = 10;

export class Series {
  constructor() {
    this.points = [];
  }

  add(time, value) {
    this.points.push({ time, value });
    while (this.points[0].time < time - WINDOW_S) this.points.shift();
  }
}

// Draws series with the same scale: [{series, colour}], the newest point at the right edge.
export function draw(canvas, lines, format) {
  const { context, width, height } = prepare(canvas);
  const all = lines.flatMap((line) => line.series.points);
  const now = Math.max(...all.map((point) => point.time), 0);
  const highest = niceLimit(Math.max(...all.map((point) => point.value ?? 0), 0));
  const span = Math.max(LEAST_WINDOW_S, now - Math.min(...all.map((point) => point.time), now));
  const x = (point) => width - ((now - point.time) / span) * width;
  const y = (value) => height - 14 - (value / highest) * (height - 26);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = colour("--dim");
  context.strokeStyle = colour("--line");
  for (const part of [0, 0.5, 1]) {
    const at = Math.round(y(part * highest)) + 0.5;
    context.beginPath();
    context.moveTo(0, at);
    context.lineTo(width, at);
    context.stroke();
  }
  context.fillText(format(highest), 2, y(highest) - 3);
  context.fillText(span > 300 ? `${Math.round(span / 60)} min ago` : `${Math.round(span)} s ago`, 2, height - 2);
  context.fillText("now", width - 22, height - 2);
  for (const line of lines) drawLine(context, line, x, y);
}

function drawLine(context, line, x, y) {
  const points = line.series.points.filter((point) => point.value !== null);
  if (points.length < 2) return;
  const path = new Path2D();
  points.forEach((point, i) => (i ? path.lineTo(x(point), y(point.value)) : path.moveTo(x(point), y(point.value))));
  const area = new Path2D(path);
  area.lineTo(x(points.at(-1)), y(0));
  area.lineTo(x(points[0]), y(0));
  context.fillStyle = line.colour;
  context.globalAlpha = 0.13;
  context.fill(area);
  context.globalAlpha = 1;
  context.strokeStyle = line.colour;
  context.lineWidth = 1.8;
  context.lineJoin = "round";
  context.stroke(path);
  context.lineWidth = 1;
}

function niceLimit(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value) * power;
}

// Counters of the last seconds, to compute rates. A counter that falls belongs to a restarted process.
export class Counters {
  constructor() {
    this.samples = [];
  }

  add(time, values) {
    if (this.samples.length && values.tokens < this.samples.at(-1).tokens) this.samples = [];
    this.samples.push({ time, ...values });
    while (this.samples.length > 2 && this.samples[1].time < time - QUANTILE_S) this.samples.shift();
  }

  rate() {
    const last = this.samples.at(-1);
    const first = this.samples.findLast((sample) => sample.time <= last.time - RATE_S) ?? this.samples[0];
    return last.time > first.time ? (last.tokens - first.tokens) / (last.time - first.time) : 0;
  }

  // The quantile of the durations of the last 30 s, in seconds; null if there are none.
  quantile(fraction) {
    const { counts, bounds } = this.samples.at(-1);
    const before = this.samples[0].counts;
    const changes = counts.map((count, i) => count - (before[i] ?? 0));
    return quantile(fraction, changes, bounds);
  }
}

function quantile(fraction, counts, bounds) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total <= 0) return null;
  let rank = fraction * total;
  for (let i = 0; i < counts.length; i++) {
    if (rank <= counts[i]) {
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] ?? low) - low) * (rank / counts[i]);
    }
    rank -= counts[i];
  }
  return bounds.at(-1);
}

// The last hour of all schedulers together: series by name, from the samples of the histories.
export function readHour(histories, bounds, now) {
  const width = 5 + bounds.length;
  const sums = new Map(); // by age in samples
  for (const values of histories.map(({ samples }) => new Float32Array(decode(samples).buffer))) {
    for (let at = 0; at + width <= values.length; at += width) {
      const age = Math.floor(values[at] / SAMPLE_S);
      const before = sums.get(age) ?? new Array(width).fill(0);
      sums.set(age, before.map((sum, i) => sum + values[at + i]));
    }
  }
  const rows = [...sums].sort(([one], [other]) => other - one);
  const points = (read) => ({ points: rows.map(([age, sum]) => ({ time: now - age * SAMPLE_S, value: read(sum) })) });
  return {
    rate: points((sum) => sum[3] / SAMPLE_S),
    ttft: points((sum) => quantile(0.5, sum.slice(4), bounds)),
    high: points((sum) => quantile(0.95, sum.slice(4), bounds)),
    running: points((sum) => sum[1]),
    waiting: points((sum) => sum[2]),
  };
}
