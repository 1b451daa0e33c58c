// Errors by code, tenants, adapters and pinned sessions.

import { make } from "./draw.js";

function show(id, rows) {
  const items = rows.map((cells) => {
    const row = make("tr");
    for (const cell of cells) row.append(make("td", cell));
    return row;
  });
  document.getElementById(id).tBodies[0].replaceChildren(...(items.length ? items : [make("tr", "none", "note")]));
}

// The sum over all schedulers of what `read` returns: pairs of a name and numbers.
function sum(schedulers, read) {
  const found = new Map();
  for (const [name, ...numbers] of schedulers.flatMap(read)) {
    const before = found.get(name) ?? numbers.map(() => 0);
    found.set(name, numbers.map((number, i) => before[i] + Number(number)));
  }
  return [...found].sort(([, one], [, other]) => other[0] - one[0]);
}

export function showUsage(schedulers) {
  show("refused", sum(schedulers, (scheduler) => Object.entries(scheduler.refused)).map(([code, [count]]) => [code, count]));
  const tenants = sum(schedulers, (scheduler) => scheduler.tenants.map((use) => [use.tenant_id, use.processor_s, use.block_s]));
  show("tenants", tenants.map(([name, [processor, blocks]]) => [name || "without a tenant", `${processor.toFixed(1)} s`, blocks.toFixed(0)]));
  const adapters = schedulers.flatMap((scheduler) => scheduler.adapters.map((adapter) => ({ ...adapter, at: scheduler.address })));
  show("adapters", adapters.map((adapter) => [adapter.name, adapter.digest.slice(0, 12), adapter.at]));
}

export function showErrors(state) {
  show("errors", state.errors.toReversed().map(([method, code, count]) => [code, method, count]));
  show("sessions", state.pins_by_owner.map((pins) => [pins.owner || "without a key", pins.num_sessions]));
}
