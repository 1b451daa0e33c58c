// The requests that run or ended lately, and the time line of one of them: #requests=ID.

import { readHistory } from "./api.js";
import { make } from "./draw.js";

const field = (id) => document.getElementById(id);
const chosen = () => decodeURIComponent(location.hash.match(/^#requests=(.+)$/)?.[1] ?? "");

export function linkTo(id, text = id) {
  const link = make("a", text);
  link.href = `#requests=${encodeURIComponent(id)}`;
  return link;
}

export function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(2)} s`;
}

function rowOf(cells) {
  const row = make("tr");
  for (const cell of cells) row.insertCell().append(cell);
  return row;
}

export class Requests {
  constructor() {
    this.ended = [];
    this.rows = new Map();
    field("request-filter").addEventListener("input", () => this.show(this.open ?? []));
  }

  // `open`: sequences of the state; those that have ended are kept from the last history.
  show(open) {
    this.open = open;
    const words = field("request-filter").value.toLowerCase();
    const found = (request) => `${request.request_id} ${request.tenant_id ?? ""} ${request.reason ?? ""}`.toLowerCase().includes(words);
    const running = open.filter((sequence) => found(sequence) && !sequence.sample_index);
    const rows = running.map((sequence) =>
      this.rowFor(sequence.request_id, "", [sequence.worker ? `runs on ${sequence.worker}` : "waits", seconds(sequence.age_s),
        `${sequence.prompt_tokens} → ${sequence.num_tokens - sequence.prompt_tokens}`]));
    const ended = this.ended.filter(found).map((request) =>
      this.rowFor(request.request_id, request.ended_at, [request.reason, seconds(request.ended_at - request.arrived_at),
        `${request.prompt_tokens} → ${request.output_tokens}`]));
    const [body, wanted] = [field("requests").tBodies[0], [...rows, ...ended]];
    for (const [key, row] of this.rows) if (!wanted.includes(row)) this.rows.delete(key);
    if (wanted.length !== body.rows.length || wanted.some((row, i) => row !== body.rows[i])) body.replaceChildren(...wanted);
  }

  // Rows stay the same elements, so that a click is not lost.
  rowFor(id, endedAt, texts) {
    const key = `${id} ${endedAt}`;
    if (!this.rows.has(key)) this.rows.set(key, rowOf([linkTo(id), ...texts]));
    const row = this.rows.get(key);
    texts.forEach((text, i) => { row.cells[i + 1].textContent = text; });
    return row;
  }

  update(schedulers) {
    this.ended = schedulers.flatMap((scheduler) => scheduler.ended).sort((one, other) => other.ended_at - one.ended_at);
  }

  // Asks for the time line of the chosen request. It may be on several schedulers: each shows its part.
  async readChosen() {
    const id = chosen();
    field("timeline").hidden = !id;
    if (!id) return;
    const parts = (await readHistory(id)).filter((scheduler) => scheduler.request);
    field("timeline-title").textContent = id;
    const unknown = make("p", "No scheduler knows it: only open requests and the last 200 of each scheduler are kept.", "note");
    field("timeline-parts").replaceChildren(...(parts.length ? parts.map(drawPart) : [unknown]));
  }
}

function drawPart({ address, request }) {
  const part = make("div");
  const facts = [
    request.reason ? `ended: ${request.reason}` : "open",
    seconds(request.ended_at - request.arrived_at),
    `${request.prompt_tokens} prompt tokens`,
    request.tenant_id && `tenant ${request.tenant_id}`,
    `scheduler ${address}`,
    request.trace_id && `trace ${request.trace_id}`,
  ];
  part.append(make("p", facts.filter(Boolean).join(" · "), "note"));
  const span = Math.max(request.ended_at - request.arrived_at, 1e-3);
  const table = part.appendChild(make("table"));
  const stages = request.stages.sort((one, other) => one.sample_index - other.sample_index || one.start - other.start);
  for (const stage of stages) {
    const bar = make("div", "", "stage");
    const mark = bar.appendChild(make("i", "", stage.name));
    mark.style.marginLeft = `${(100 * (stage.start - request.arrived_at)) / span}%`;
    mark.style.width = `${(100 * (stage.end - stage.start)) / span}%`;
    const where = stage.name === "move" ? `moved: ${stage.reason}${stage.worker_id && `, resumed on ${stage.worker_id}`}` : stage.worker_id;
    table.append(rowOf([`#${stage.sample_index} ${stage.name}`, bar, seconds(stage.end - stage.start), where]));
  }
  return part;
}
