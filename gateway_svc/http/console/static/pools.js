// The block pools of all workers, drawn as pages, and their rows.

import { colour, decode, fillOf, make, prepare, shortId, showTip } from "./draw.js";

const [FREE, CACHED, USED, SHARED] = [0, 1, 2, 3];
const NAMES = ["free", "cached prefix", "used", "shared"];
const GAP = 2;
const MAX_HEIGHT = 240; // of all pools together
const LEAST_HEIGHT = 60; // of one pool
const FLASH_MS = 500;
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

// Largest size of a cell with which all cells fit.
function cellSize(count, width, height) {
  for (let size = 18; size > 3; size--) {
    if (Math.ceil(count / Math.floor(width / size)) * size <= height) return size;
  }
  return 3;
}

class PoolView {
  constructor(id, heightOf) {
    this.heightOf = heightOf;
    this.element = document.createElement("div");
    this.element.className = "pool";
    this.element.dataset.worker = id;
    this.head = this.element.appendChild(document.createElement("div"));
    this.head.className = "pool-head";
    this.canvas = this.element.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("role", "img");
    this.rowList = this.element.appendChild(document.createElement("div"));
    this.rowList.className = "rows";
    this.rowElements = new Map();
    this.highlighted = null;
    this.changedAt = [];
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => showTip(null));
  }

  update(worker, pool) {
    this.worker = worker;
    this.pool = pool;
    const states = decode(pool.states);
    const owners = new Uint32Array(decode(pool.owners).buffer);
    const now = performance.now();
    for (let i = 0; i < states.length; i++) {
      const hasChanged = this.states && !pool.is_ordered && (states[i] !== this.states[i] || owners[i] !== this.owners[i]);
      this.changedAt[i] = hasChanged ? now : (this.changedAt[i] ?? -FLASH_MS);
    }
    this.states = states;
    this.owners = owners;
    this.showHead();
    this.showRows();
    this.paint();
  }

  showHead() {
    const { worker, pool } = this;
    const state = worker.state.replace("WORKER_STATE_", "").toLowerCase();
    const total = pool.num_blocks;
    const parts = [
      ["b", worker.worker_id],
      ["span", state, state === "ready" ? "state" : "state away"],
      ["span", `${worker.rows_used} of ${worker.rows_total} rows`],
      ["span", `${worker.blocks_used} used, ${pool.num_shared} shared, ${worker.blocks_cached} cached, ${worker.blocks_free} free`],
      ["span", `${total} blocks of ${pool.block_size} tokens${pool.blocks_per_cell > 1 ? `, ${pool.blocks_per_cell} per square` : ""}`],
      ["span", pool.is_ordered ? "used blocks first" : ""],
    ];
    this.head.replaceChildren(...parts.map(([tag, text, name]) => make(tag, text, name)));
    this.canvas.setAttribute(
      "aria-label",
      `Pool of ${worker.worker_id}: ${worker.blocks_used} blocks used, ${worker.blocks_cached} cached, ${worker.blocks_free} free`,
    );
  }

  showRows() {
    const seen = new Set();
    this.pool.rows.forEach((row, index) => {
      const key = `${row.request_id}/${row.sample_index}`;
      seen.add(key);
      let element = this.rowElements.get(key);
      if (!element) {
        element = this.makeRow(row);
        this.rowElements.set(key, element);
        this.rowList.append(element);
      }
      element.dataset.index = index + 1;
      element.querySelector(".size").textContent =
        `${row.is_prefill ? "prefill" : "decode"} · ${row.num_tokens} tokens · ${row.num_blocks} blocks`;
      paintProgress(element.querySelector("canvas"), row);
    });
    for (const [key, element] of this.rowElements) {
      if (seen.has(key)) continue;
      element.remove();
      this.rowElements.delete(key);
    }
  }

  makeRow(row) {
    const element = make("div", "", "row");
    element.tabIndex = 0;
    const dot = element.appendChild(make("i", "", "dot"));
    dot.style.background = fillOf(row.request_id);
    element.append(make("span", shortId(row), "name"), make("span", "", "size"));
    element.append(document.createElement("canvas"));
    element.title = row.request_id;
    const highlight = (value) => {
      this.highlighted = value;
      this.paint();
    };
    element.addEventListener("mouseenter", () => highlight(Number(element.dataset.index)));
    element.addEventListener("mouseleave", () => highlight(null));
    element.addEventListener("focus", () => highlight(Number(element.dataset.index)));
    element.addEventListener("blur", () => highlight(null));
    return element;
  }

  paint() {
    const count = this.states.length;
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const size = cellSize(count, width, this.heightOf());
    const perLine = Math.max(1, Math.floor((width + GAP) / size));
    const height = Math.ceil(count / perLine) * size;
    this.canvas.style.height = `${height}px`;
    const { context } = prepare(this.canvas, height);
    this.layout = { size, perLine };
    const colours = [colour("--free"), colour("--cached")];
    const [text, now] = [colour("--text"), performance.now()];
    const radius = size > 8 ? 3 : 1;
    let isFading = false;
    for (let i = 0; i < count; i++) {
      const [state, owner] = [this.states[i], this.owners[i]];
      const [x, y] = [(i % perLine) * size, Math.floor(i / perLine) * size];
      const row = owner ? this.pool.rows[owner - 1] : null;
      const isDimmed = this.highlighted !== null && owner !== this.highlighted;
      context.globalAlpha = isDimmed ? 0.25 : 1;
      context.fillStyle = state < USED ? colours[state] : row ? fillOf(row.request_id) : colour("--dim");
      square(context, x, y, size, radius);
      if (state === SHARED) ring(context, x, y, size, radius, text);
      const age = now - this.changedAt[i];
      if (age < FLASH_MS && !isStill.matches && state !== FREE) {
        context.globalAlpha = 0.7 * (1 - age / FLASH_MS);
        context.fillStyle = "#fff";
        square(context, x, y, size, radius);
        isFading = true;
      }
    }
    context.globalAlpha = 1;
    if (isFading && !this.isPlanned) {
      this.isPlanned = true;
      requestAnimationFrame(() => {
        this.isPlanned = false;
        this.paint();
      });
    }
  }

  point(event) {
    const { size, perLine } = this.layout;
    const cell = Math.floor(event.offsetY / size) * perLine + Math.floor(event.offsetX / size);
    if (!(cell in this.states)) return showTip(null);
    const row = this.owners[cell] ? this.pool.rows[this.owners[cell] - 1] : null;
    const name = this.pool.is_ordered ? "" : `block ${cell}: `;
    showTip(event, `${name}${NAMES[this.states[cell]]}${row ? `\n${row.request_id}` : ""}`);
  }
}

function square(context, x, y, size, radius) {
  context.beginPath();
  context.roundRect(x, y, size - GAP, size - GAP, radius);
  context.fill();
}

function ring(context, x, y, size, radius, style) {
  context.strokeStyle = style;
  context.lineWidth = size > 8 ? 2 : 1;
  context.beginPath();
  context.roundRect(x + 1, y + 1, size - GAP - 2, size - GAP - 2, radius);
  context.stroke();
}

// The tokens of a row: cached part of the prompt, computed part, the rest of the prompt, output.
function paintProgress(canvas, row) {
  const { context, width, height } = prepare(canvas, 5);
  const style = fillOf(row.request_id);
  const length = Math.max(row.num_tokens, row.prompt_tokens);
  const bar = (from, to, paint, alpha) => {
    context.globalAlpha = alpha;
    context.fillStyle = paint;
    context.fillRect((from / length) * width, 0, ((to - from) / length) * width, height);
  };
  bar(0, length, colour("--free"), 1);
  bar(0, Math.min(row.num_computed_tokens, row.prompt_tokens), style, 0.45);
  bar(0, Math.min(row.num_cached_tokens, row.prompt_tokens), colour("--cached"), 1);
  bar(row.prompt_tokens, row.num_tokens, style, 1);
  context.globalAlpha = 1;
}

// Owns the views of all pools. `schedulers`: as in the state. Workers that are loading or lost have no pool.
export class PoolBoard {
  constructor(container) {
    this.container = container;
    this.views = new Map();
    new ResizeObserver(() => this.views.forEach((view) => view.paint())).observe(container);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.views.forEach((view) => view.paint());
    });
  }

  // `numWorkers`: all workers that have a pool, drawn or not.
  update(schedulers, numWorkers) {
    const left = new Set(this.views.keys());
    for (const scheduler of schedulers) {
      for (const pool of scheduler.pools) {
        const worker = scheduler.workers.find((other) => other.worker_id === pool.worker_id);
        if (!worker) continue;
        const key = `${scheduler.address}/${pool.worker_id}`;
        left.delete(key);
        this.viewOf(key, pool).update(worker, pool);
      }
    }
    for (const key of left) this.views.delete(key);
    const isPart = this.views.size < numWorkers;
    document.getElementById("count-pools").textContent = isPart ? `${this.views.size} of ${numWorkers} workers` : "";
    const wanted = [...this.views].sort(([one], [other]) => one.localeCompare(other)).map(([, view]) => view.element);
    if (wanted.length !== this.container.children.length || wanted.some((one, i) => one !== this.container.children[i])) {
      this.container.replaceChildren(...wanted);
    }
  }

  viewOf(key, pool) {
    if (!this.views.has(key)) {
      const view = new PoolView(pool.worker_id, () => Math.max(LEAST_HEIGHT, MAX_HEIGHT / this.views.size));
      this.views.set(key, view);
      this.container.append(view.element); // it needs a width to be painted
    }
    return this.views.get(key);
  }
}
