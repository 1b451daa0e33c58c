// The page: asks for the state twice per second while it is visible, and hands it to its parts.

import { ApiError, keys, readHistory, readState } from "./api.js";
import { Counters, draw, readHour, Series } from "./charts.js";
import { colour, make } from "./draw.js";
import { Fleet } from "./fleet.js";
import { Playground } from "./playground.js";
import { PoolBoard } from "./pools.js";
import { Requests, seconds } from "./requests.js";
import { Lanes } from "./sequences.js";
import { showErrors, showUsage } from "./usage.js";

const INTERVAL_MS = 500;
const RETRY_MS = 2000;
const HISTORY_MS = 2000;
const field = (id) => document.getElementById(id);

const counters = new Counters();
const series = Object.fromEntries(["rate", "ttft", "high", "running", "waiting"].map((name) => [name, new Series()]));
const lanes = new Lanes();
const pools = new PoolBoard(field("pools"));
const playground = new Playground();
const fleet = new Fleet();
const requests = new Requests();
let models = "";
let histories = [];
let historyAt = -HISTORY_MS;

function total(schedulers, name) {
  return schedulers.reduce((sum, scheduler) => sum + Number(scheduler[name] ?? 0), 0);
}

// Histograms of all schedulers have the same bounds.
function firstTokens(schedulers) {
  const histograms = schedulers.map((scheduler) => scheduler.first_token).filter((found) => found?.counts.length);
  const counts = histograms[0]?.counts.map((_, i) => histograms.reduce((sum, one) => sum + Number(one.counts[i]), 0));
  return { counts: counts ?? [], bounds: histograms[0]?.bounds_s ?? [] };
}

function number(value) {
  return value >= 10000 ? `${(value / 1000).toFixed(value >= 1e5 ? 0 : 1)}k` : String(Math.round(value));
}

// What clients can name in place of a model: its targets with their weights, and its shadow.
function routeItem(route) {
  const targets = Object.entries(route.targets).map((pair) => pair.join(" "));
  if (route.shadow) targets.push(`shadow ${route.shadow}`);
  const item = make("li", route.name);
  item.append(make("span", ` → ${targets.join(", ")}`));
  return item;
}

function showModels(schedulers, routes) {
  const [ready, revisions] = [new Map(), new Map()];
  for (const scheduler of schedulers) {
    const workers = scheduler.workers.filter((worker) => worker.state === "WORKER_STATE_READY").length;
    if (scheduler.model) ready.set(scheduler.model, (ready.get(scheduler.model) ?? 0) + workers);
    if (workers) revisions.set(scheduler.model, (revisions.get(scheduler.model) ?? new Set()).add(scheduler.revision));
  }
  const items = [...ready].map(([name, count]) => {
    const item = make("li", name);
    item.append(make("span", ` ${count} ${count === 1 ? "worker" : "workers"}`));
    const different = revisions.get(name)?.size ?? 0;
    if (different > 1) item.append(make("b", `, ${different} revisions`, "bad"));
    return item;
  });
  field("models").replaceChildren(...items, ...routes.map(routeItem));
  const names = JSON.stringify([...ready.keys(), ...routes.map((route) => route.name)]);
  if (names !== models) {
    models = names;
    playground.loadModels().catch(askForKeys);
  }
}

function showNumbers(state) {
  const { schedulers, time } = state;
  counters.add(time, { tokens: total(schedulers, "output_tokens"), ...firstTokens(schedulers) });
  const [rate, low, high] = [counters.rate(), counters.quantile(0.5), counters.quantile(0.95)];
  const [running, waiting] = [total(schedulers, "num_running"), total(schedulers, "num_waiting")];
  for (const [name, value] of Object.entries({ rate, ttft: low, high, running, waiting })) series[name].add(time, value);
  field("rate").textContent = number(rate);
  field("ttft").textContent = seconds(low);
  field("ttft-high").textContent = seconds(high);
  field("running").textContent = running;
  field("waiting").textContent = waiting;
  const [asked, hit] = [total(schedulers, "prefix_query_tokens"), total(schedulers, "prefix_hit_tokens")];
  field("hits").textContent = asked ? `${Math.round((100 * hit) / asked)} %` : "–";
  field("pending").textContent = number(total(schedulers, "pending_tokens"));
  const [kept, tokens] = [total(schedulers, "accepted_draft_tokens"), total(schedulers, "output_tokens")];
  field("drafts").textContent = kept ? `${Math.round((100 * kept) / tokens)} % of tokens` : "–";
  field("preemptions").textContent = total(schedulers, "preemptions");
  field("streams").textContent = state.open_streams;
  const owners = state.pins_by_owner.filter((pins) => pins.owner).map((pins) => `${pins.owner} ${pins.num_sessions}`);
  field("pinned").textContent = [state.pinned_sessions ?? "–", ...owners].join(", ");
}

function drawCharts(state) {
  const isHour = field("hour").ariaPressed === "true";
  const shown = isHour ? readHour(histories, firstTokens(state.schedulers).bounds, state.time) : series;
  const [first, second] = [colour("--accent"), colour("--second")];
  draw(field("chart-rate"), [{ series: shown.rate, colour: first }], number);
  draw(field("chart-ttft"), [{ series: shown.high, colour: second }, { series: shown.ttft, colour: first }], seconds);
  draw(field("chart-queue"), [{ series: shown.running, colour: first }, { series: shown.waiting, colour: second }], number);
}

function show(state) {
  showModels(state.schedulers, state.routes);
  showNumbers(state);
  drawCharts(state);
  showErrors(state);
  fleet.update(state.time, state.schedulers);
  pools.update(state.schedulers, fleet.live().length);
  requests.show(lanes.update(state.schedulers));
  const away = state.schedulers.filter((scheduler) => !scheduler.connected).length;
  field("connection").className = away ? "" : "live";
  field("connection").textContent = away ? `${away} of ${state.schedulers.length} schedulers not connected` : "live";
}

function showHistory(schedulers) {
  for (const { address, events } of schedulers) fleet.addEvents(address, events);
  histories = schedulers;
  requests.update(schedulers);
  showUsage(schedulers);
}

function askForKeys(error) {
  if (!(error instanceof ApiError) || ![401, 403].includes(error.status) || field("keys").open) return;
  field("keys-note").textContent = `${error.message}. Keys are kept in this tab only.`;
  field("keys").showModal();
}

async function poll() {
  if (document.hidden) return setTimeout(poll, RETRY_MS);
  let pause = INTERVAL_MS;
  try {
    if (performance.now() - historyAt >= HISTORY_MS) {
      showHistory(await readHistory());
      historyAt = performance.now();
      await requests.readChosen();
    }
    show(await readState(fleet.wanted()));
  } catch (error) {
    field("connection").className = "";
    field("connection").textContent = error.message;
    askForKeys(error);
    pause = RETRY_MS;
  }
  return setTimeout(poll, pause);
}

// The view that the address names; the first one by default.
function showView() {
  const views = [...document.querySelectorAll("[data-view]")];
  const name = location.hash.slice(1).split("=")[0];
  const shown = views.find((view) => view.dataset.view === name) ?? views[0];
  for (const view of views) view.hidden = view !== shown;
  for (const link of document.querySelectorAll("nav a")) link.ariaCurrent = link.hash === `#${shown.dataset.view}` ? "page" : null;
}

addEventListener("hashchange", () => {
  showView();
  historyAt = -HISTORY_MS;
});
showView();
field("hour").addEventListener("click", ({ target }) => { target.ariaPressed = target.ariaPressed !== "true"; });
field("keys-button").addEventListener("click", () => {
  field("operator-key").value = keys.operator;
  field("inference-key").value = keys.inference;
  field("keys").showModal();
});
field("keys-form").addEventListener("submit", () => {
  keys.set(field("operator-key").value.trim(), field("inference-key").value.trim());
  models = "";
});
poll();
