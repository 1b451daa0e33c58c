// Sequences as they move from WAITING to RUNNING to FINISHED. The rows of workers that are not drawn are not known: a sequence
// has finished when it has left the rows of a drawn worker, or is gone while all workers are drawn.

import { fillOf, make, shortId } from "./draw.js";
import { linkTo } from "./requests.js";

const MAX_FINISHED = 24;
const MAX_SHOWN = 40;
const keyOf = (sequence) => `${sequence.request_id}/${sequence.sample_index}`;

export class Lanes {
  constructor() {
    this.open = new Map();
    this.finished = new Map();
    this.elements = new Map();
  }

  // `schedulers`: as in the state. A scheduler that does not answer keeps its sequences. Returns the open ones.
  update(schedulers) {
    const waiting = schedulers.flatMap((scheduler) => scheduler.waiting);
    const poolsOf = (scheduler) => scheduler.pools.map((pool) => [`${scheduler.address}/${pool.worker_id}`, pool]);
    const pools = new Map(schedulers.flatMap(poolsOf));
    const running = [...pools].flatMap(([at, pool]) => pool.rows.map((row) => ({ ...row, at, worker: pool.worker_id })));
    const open = new Map([...waiting, ...running].map((sequence) => [keyOf(sequence), sequence]));
    const isWhole = running.length >= sum(schedulers, "num_running");
    if (schedulers.every((scheduler) => scheduler.connected)) {
      const hasEnded = ([key, sequence]) => !open.has(key) && (isWhole || pools.has(sequence.at));
      for (const [key, sequence] of [...this.open].filter(hasEnded)) this.finish(key, sequence);
      this.open = open;
    }
    for (const key of open.keys()) this.finished.delete(key);
    this.show("waiting", waiting, sum(schedulers, "num_waiting"));
    this.show("running", running, sum(schedulers, "num_running"));
    this.show("finished", [...this.finished.values()].reverse(), sum(schedulers, "finished"));
    return [...running, ...waiting];
  }

  finish(key, sequence) {
    this.finished.set(key, sequence);
    if (this.finished.size > MAX_FINISHED) this.finished.delete(this.finished.keys().next().value);
  }

  show(name, sequences, count) {
    const isPart = name !== "finished" && sequences.length < count;
    document.getElementById(`count-${name}`).textContent = isPart ? `${count}, ${sequences.length} shown` : count;
    const lane = document.getElementById(`lane-${name}`);
    const wanted = sequences.slice(0, MAX_SHOWN).map((sequence) => this.elementOf(name, sequence));
    if (lane.children.length !== wanted.length || wanted.some((element, i) => lane.children[i] !== element)) {
      lane.replaceChildren(...wanted);
    }
    for (const key of this.elements.keys()) {
      if (!this.open.has(key) && !this.finished.has(key)) this.elements.delete(key);
    }
  }

  elementOf(name, sequence) {
    const key = keyOf(sequence);
    let element = this.elements.get(key);
    if (element?.dataset.lane !== name) {
      element = make("li");
      element.dataset.lane = name;
      element.title = sequence.request_id;
      const dot = element.appendChild(make("i"));
      dot.style.background = fillOf(sequence.request_id);
      element.append(linkTo(sequence.request_id, shortId(sequence)), make("small"));
      this.elements.set(key, element);
    }
    const output = sequence.num_tokens - sequence.prompt_tokens;
    element.lastChild.textContent =
      name === "waiting" ? `${sequence.prompt_tokens} + ${sequence.age_s.toFixed(1)} s` : `${sequence.prompt_tokens} → ${output}`;
    return element;
  }
}

function sum(schedulers, field) {
  return schedulers.reduce((total, scheduler) => total + Number(scheduler[field]), 0);
}
