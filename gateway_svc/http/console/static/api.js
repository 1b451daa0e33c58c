// Calls of the console's state and of the public HTTP API. Keys stay in this tab and are sent in a header.

export const keys = {
  get operator() { return sessionStorage.getItem("operator") ?? ""; },
  get inference() { return sessionStorage.getItem("inference") ?? ""; },
  set(operator, inference) {
    sessionStorage.setItem("operator", operator);
    sessionStorage.setItem("inference", inference);
  },
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `status ${response.status}`);
}

// With the pools of these workers; without any, of the first ones.
export async function readState(workers) {
  const query = new URLSearchParams(workers.map((id) => ["worker", id]));
  const response = await fetch(`/console/api/state?${query}`, { headers: headers(keys.operator), cache: "no-store" });
  return (await checked(response)).json();
}

// Of all schedulers: events and requests that ended, or one request with its stages.
export async function readHistory(request = "") {
  const query = new URLSearchParams(request && { request });
  const response = await fetch(`/console/api/history?${query}`, { headers: headers(keys.operator), cache: "no-store" });
  return (await checked(response)).json();
}

export async function readModels() {
  const response = await fetch("/v1/models", { headers: headers(keys.inference || keys.operator) });
  return (await (await checked(response)).json()).data.map((model) => model.id);
}

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(keys.inference || keys.operator) },
    body: JSON.stringify(body),
    signal,
  });
  return checked(response);
}

// The texts of the tokens of a chat's prompt.
export async function readPromptTokens(model, messages) {
  const body = { model, messages, add_generation_prompt: true, return_token_strs: true };
  return (await (await post("/tokenize", body)).json()).token_strs ?? [];
}

// The events of a streamed chat completion.
export async function* streamChat(body, signal) {
  const response = await post("/v1/chat/completions", { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(parsed.error.code ?? 0, parsed.error.message);
      yield parsed;
    }
  }
}
