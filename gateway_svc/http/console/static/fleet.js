// The fleet: all schedulers, a table of all workers with sort and filter, and the events that the schedulers keep.

import { make } from "./draw.js";

const MAX_POOLS = 4; // drawn without a choice; with more workers, the page asks for the pools of the chosen ones
const MAX_CHOSEN = 8;
const KEEP_ROWS = 4;
const MAX_EVENTS = 200;
const RATE_S = 2;
const field = (id) => document.getElementById(id);
const stateOf = (worker) => worker.state.replace("WORKER_STATE_", "").toLowerCase();
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const COLUMNS = [
  { title: "Worker", value: (worker) => worker.id },
  { title: "Scheduler", value: (worker) => worker.address },
  { title: "Model", value: (worker) => worker.model },
  { title: "State", value: (worker) => worker.state, text: describeState },
  { title: "Rows", value: (worker) => worker.rows, text: (worker) => (worker.maxRows ? `${worker.rows} of ${worker.maxRows}` : "–") },
  { title: "Blocks used", value: (worker) => worker.used / worker.blocks || 0, text: () => "" },
  { title: "Steps/s", value: (worker) => worker.rate, text: (worker) => worker.rate.toFixed(1) },
];

function describeState(worker) {
  if (worker.state !== "lost") return worker.state;
  const moved = worker.rowsAtLoss ? `, ${plural(worker.rowsAtLoss, "sequence")} moved` : "";
  return `lost ${Math.round(worker.now - worker.lostAt)} s ago${moved}`;
}

// One worker through all states in which it was seen.
class Worker {
  constructor(id, address) {
    this.id = id;
    this.address = address;
    this.state = "";
    this.samples = [];
    this.rows = this.rowsAtLoss = 0;
  }

  update(time, scheduler, info) {
    const [before, state] = [this.state, stateOf(info)];
    this.now = time;
    this.model = scheduler.model;
    this.state = state;
    if (state === "lost" && before !== "lost") this.lose(time);
    if (state === "lost") return;
    [this.rows, this.maxRows] = [info.rows_used, info.rows_total];
    [this.used, this.cached] = [info.blocks_used, info.blocks_cached];
    this.blocks = info.blocks_used + info.blocks_cached + info.blocks_free;
    this.samples.push({ time, steps: Number(info.steps) });
    while (this.samples.length > 2 && this.samples[1].time < time - RATE_S) this.samples.shift();
  }

  lose(time) {
    this.state = "lost";
    this.lostAt = time;
    this.rowsAtLoss = this.rows;
    [this.rows, this.used, this.cached, this.samples] = [0, 0, 0, []];
  }

  get rate() {
    const [first, last] = [this.samples[0], this.samples.at(-1)];
    return last?.time > first?.time ? Math.max(0, (last.steps - first.steps) / (last.time - first.time)) : 0;
  }
}

export class Fleet {
  constructor() {
    this.workers = new Map();
    this.schedulers = new Map();
    this.rows = new Map();
    this.chosen = new Set();
    this.drawn = new Set();
    this.events = new Map();
    this.order = { column: 0, isDown: false };
    this.showHead();
    field("filter").addEventListener("input", () => this.show());
  }

  // The workers whose pools the page needs: the chosen ones, or the busiest. Empty: there are few, so all of them. A pool
  // that is drawn stays until another one is clearly busier.
  wanted() {
    if (this.chosen.size) return [...this.chosen];
    const rowsOf = (worker) => worker.rows + (this.drawn.has(worker.id) ? KEEP_ROWS : 0);
    const live = this.live().sort((a, b) => rowsOf(b) - rowsOf(a) || a.id.localeCompare(b.id));
    this.drawn = new Set(live.slice(0, MAX_POOLS).map((worker) => worker.id));
    return live.length > MAX_POOLS ? [...this.drawn] : [];
  }

  live() {
    return [...this.workers.values()].filter((worker) => worker.state !== "lost");
  }

  update(time, schedulers) {
    const seen = new Set();
    for (const scheduler of schedulers) {
      this.compare(time, scheduler);
      for (const info of scheduler.workers) {
        const key = `${scheduler.address}/${info.worker_id}`;
        seen.add(key);
        this.see(time, key, scheduler, info);
      }
      if (!scheduler.connected) for (const key of this.keysOf(scheduler.address)) seen.add(key); // not known
    }
    for (const [key, worker] of this.workers) if (!seen.has(key)) this.leave(time, key, worker);
    this.show();
  }

  keysOf(address) {
    return [...this.workers].filter(([, worker]) => worker.address === address).map(([key]) => key);
  }

  see(time, key, scheduler, info) {
    const worker = this.workers.get(key) ?? new Worker(info.worker_id, scheduler.address);
    const before = worker.state;
    this.workers.set(key, worker);
    worker.update(time, scheduler, info);
    if (worker.state === "lost" && !before) this.workers.delete(key); // lost before the page saw it
  }

  // A lost worker stays in the table; one that was drained does not.
  leave(time, key, worker) {
    worker.now = time;
    if (worker.state === "lost") return;
    if (worker.state === "draining") this.workers.delete(key);
    else worker.lose(time);
  }

  // A scheduler without a connection keeps what it was.
  compare(time, scheduler) {
    const before = this.schedulers.get(scheduler.address);
    this.schedulers.set(scheduler.address, scheduler.connected ? scheduler : { ...before, ...scheduler, connected: false });
    if (before && before.connected !== scheduler.connected) {
      const text = `scheduler is ${scheduler.connected ? "connected" : "not connected"}`;
      this.addEvents(scheduler.address, [{ at: time, text, is_bad: !scheduler.connected, count: 0 }]);
    }
  }

  // Events of a scheduler, which may be known. Those of its earlier processes stay.
  addEvents(address, events) {
    for (const event of events) this.events.set(`${address} ${event.at} ${event.text}`, { ...event, address });
    if (this.events.size <= MAX_EVENTS) return;
    this.events = new Map([...this.events].sort(([, one], [, other]) => one.at - other.at).slice(-MAX_EVENTS));
  }

  show() {
    this.showSchedulers();
    this.showWorkers();
    this.showEvents();
  }

  showEvents() {
    const newest = [...this.events.values()].sort((one, other) => other.at - one.at);
    const items = newest.map(({ at, address, text, is_bad, count }) => {
      const item = make("li", "", is_bad ? "bad" : "");
      const words = `${count ? `${count} ` : ""}${text}${this.schedulers.size > 1 ? ` (${address})` : ""}`;
      item.append(make("time", new Date(1000 * at).toLocaleTimeString([], { hour12: false })), make("span", words));
      return item;
    });
    field("events").replaceChildren(...(items.length ? items : [make("li", "no events")]));
  }

  showSchedulers() {
    const items = [...this.schedulers.values()].map((scheduler) => {
      const item = make("li", "", scheduler.connected ? "" : "bad");
      const facts = scheduler.connected
        ? [
            scheduler.revision && `revision ${scheduler.revision.slice(0, 12)}`,
            `prefix index in ${scheduler.prefix_index}`,
            plural(scheduler.num_gateways, "gateway"),
          ]
        : ["not connected"];
      item.append(make("b", scheduler.address), ...facts.filter(Boolean).map((fact) => make("span", fact)));
      return item;
    });
    field("schedulers").replaceChildren(...items);
  }

  showHead() {
    const cells = COLUMNS.map(({ title }, column) => {
      const cell = make("th");
      const button = cell.appendChild(make("button", title, "quiet"));
      button.type = "button";
      button.addEventListener("click", () => {
        this.order = { column, isDown: this.order.column === column && !this.order.isDown };
        this.show();
      });
      return cell;
    });
    field("workers").tHead.rows[0].replaceChildren(...cells);
  }

  showWorkers() {
    const words = field("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const { column, isDown } = this.order;
    const value = COLUMNS[column].value;
    const found = [...this.workers].filter(([, worker]) => {
      const text = `${worker.id} ${worker.address} ${worker.model} ${worker.state}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    found.sort(([one, first], [other, second]) => {
      const [a, b] = [value(first), value(second)];
      return (isDown ? -1 : 1) * (a < b ? -1 : a > b ? 1 : one.localeCompare(other));
    });
    [...field("workers").tHead.rows[0].cells].forEach((cell, i) => {
      cell.ariaSort = i !== column ? "none" : isDown ? "descending" : "ascending";
    });
    for (const key of this.rows.keys()) if (!this.workers.has(key)) this.rows.delete(key);
    field("workers").tBodies[0].replaceChildren(...found.map(([key, worker]) => this.rowOf(key, worker)));
    field("count-workers").textContent = found.length === this.workers.size ? found.length : `${found.length} of ${this.workers.size}`;
  }

  rowOf(key, worker) {
    if (!this.rows.has(key)) this.rows.set(key, this.makeRow(worker.id));
    const row = this.rows.get(key);
    row.className = worker.state;
    row.cells[0].firstChild.ariaPressed = this.chosen.has(worker.id);
    COLUMNS.forEach(({ value, text }, i) => {
      if (i !== 0 && i !== 5) row.cells[i].textContent = text ? text(worker) : value(worker);
    });
    const [used, cached] = row.cells[5].firstChild.children;
    used.style.width = `${(100 * worker.used) / worker.blocks || 0}%`;
    cached.style.width = `${(100 * worker.cached) / worker.blocks || 0}%`;
    row.cells[5].title = `${worker.used ?? 0} used, ${worker.cached ?? 0} cached, of ${worker.blocks ?? 0} blocks`;
    return row;
  }

  makeRow(id) {
    const row = make("tr");
    row.append(...COLUMNS.map(() => make("td")));
    const button = row.cells[0].appendChild(make("button", id, "quiet"));
    button.type = "button";
    button.title = "show its blocks";
    button.addEventListener("click", () => this.choose(id));
    const bar = row.cells[5].appendChild(make("div", "", "bar"));
    bar.append(make("i", "", "used"), make("i", "", "cached"));
    return row;
  }

  choose(id) {
    if (!this.chosen.delete(id)) this.chosen.add(id);
    if (this.chosen.size > MAX_CHOSEN) this.chosen.delete(this.chosen.values().next().value);
    this.show();
  }
}
