// A chat over the public HTTP API: streamed tokens with their probabilities, and the cached part of the prompt.

import { readModels, readPromptTokens, streamChat } from "./api.js";
import { make, showTip } from "./draw.js";

const TOP = 5;
const field = (id) => document.getElementById(id);

export class Playground {
  constructor() {
    this.messages = [];
    this.running = null;
    field("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(field("message").value.trim());
    });
    field("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        field("form").requestSubmit();
      }
    });
    field("stop").addEventListener("click", () => this.running?.abort());
    field("clear").addEventListener("click", () => this.clear());
  }

  async loadModels() {
    const names = await readModels();
    const select = field("model");
    const before = select.value;
    select.replaceChildren(...names.map((name) => make("option", name)));
    if (names.includes(before)) select.value = before;
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    field("chat").replaceChildren();
    field("answer-note").textContent = "";
    field("prompt-tokens").hidden = true;
  }

  async send(text) {
    if (!text || this.running) return;
    field("message").value = "";
    this.messages.push({ role: "user", content: text });
    this.add("user", text);
    this.running = new AbortController();
    this.content = "";
    this.setBusy(true);
    const answer = this.add("assistant", "");
    try {
      const body = this.body();
      await this.stream(body, answer);
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.classList.add("error");
        answer.append(error.message);
      }
    }
    if (this.content) this.messages.push({ role: "assistant", content: this.content });
    else this.messages.pop();
    this.running = null;
    this.setBusy(false);
  }

  body() {
    const body = {
      model: field("model").value,
      messages: [...this.messages],
      temperature: field("temperature").valueAsNumber,
      top_p: field("top-p").valueAsNumber,
      max_tokens: field("max-tokens").valueAsNumber,
      logprobs: true,
      top_logprobs: TOP,
      stream_options: { include_usage: true },
    };
    if (field("seed").value) body.seed = field("seed").valueAsNumber;
    return body;
  }

  async stream(body, answer) {
    const began = performance.now();
    const decoder = new TextDecoder();
    let firstAt = 0;
    let count = 0;
    let usage = null;
    let reason = "";
    for await (const event of streamChat(body, this.running.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      for (const token of choice.logprobs?.content ?? []) {
        firstAt ||= performance.now();
        count += 1;
        answer.append(tokenElement(token, decoder));
      }
      this.content += choice.delta.content ?? "";
      if (!choice.logprobs && choice.delta.content) answer.append(choice.delta.content);
      this.scroll();
    }
    const seconds = (performance.now() - firstAt) / 1000;
    const rate = count > 1 && seconds > 0.1 ? `, ${((count - 1) / seconds).toFixed(0)} tokens/s` : "";
    field("answer-note").textContent =
      `${count} tokens (${reason || "stopped"}), first after ${(firstAt - began).toFixed(0)} ms${rate}`;
    if (usage) await this.showPrompt(body, usage);
  }

  // The tokens of the prompt; those that came from the prefix cache are highlighted.
  async showPrompt(body, usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const tokens = await readPromptTokens(body.model, body.messages);
    field("prompt-tokens").hidden = false;
    field("prompt-note").textContent = `Prompt: ${usage.prompt_tokens} tokens, ${cached} from the prefix cache`;
    field("prompt-text").replaceChildren(
      ...tokens.map((token, i) => make("span", readable(token), i < cached ? "hit" : "")),
    );
  }

  add(role, text) {
    const message = make("article", text, role);
    field("chat").append(message);
    this.scroll();
    return message;
  }

  scroll() {
    const chat = field("chat");
    chat.scrollTop = chat.scrollHeight;
  }

  setBusy(isBusy) {
    field("send").disabled = isBusy;
    field("stop").disabled = !isBusy;
  }
}

// Vocabularies write a space as Ġ or ▁, and a line break as Ċ.
function readable(token) {
  return token.replaceAll(/[Ġ▁]/g, " ").replaceAll("Ċ", "↵\n");
}

// A token's bytes may be a part of a character, which is shown with the token that completes it.
function tokenElement(token, decoder) {
  const text = token.bytes ? decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token;
  const probability = Math.exp(token.logprob);
  const level = probability >= 0.9 ? 4 : probability >= 0.6 ? 3 : probability >= 0.3 ? 2 : 1;
  const isSpecial = /^<.+>$/.test(token.token);
  const element = make("span", text, `token p${level}${isSpecial ? " special" : ""}`);
  const lines = token.top_logprobs.map((other) => `${percent(other.logprob)}  ${JSON.stringify(other.token)}`);
  const tip = `${JSON.stringify(token.token)}: ${percent(token.logprob)}\n\n${lines.join("\n")}`;
  element.tabIndex = 0;
  element.addEventListener("mouseenter", (event) => showTip(event, tip));
  element.addEventListener("mouseleave", () => showTip(null));
  element.addEventListener("focus", (event) => showTip(event, tip));
  element.addEventListener("blur", () => showTip(null));
  return element;
}

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1).padStart(5)} %`;
}
