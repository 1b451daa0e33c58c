// Elements, colours and canvases that the parts of the page share.

const NUM_HUES = 12;

export function decode(base64) {
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}

export function make(tag, text = "", name = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
}

// A tooltip beside the pointer, or beside the element that has the focus. Without an event it is hidden.
export function showTip(event, text = "") {
  const tip = document.getElementById("tip");
  tip.hidden = !event;
  if (!event) return;
  tip.textContent = text;
  const box = event.clientX === undefined ? event.target.getBoundingClientRect() : null;
  const [x, y] = box ? [box.left, box.bottom] : [event.clientX, event.clientY];
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 10))}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - tip.offsetHeight - 10))}px`;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Requests get hues in the order in which they are first seen, so that neighbours differ.
const hues = new Map();

export function fillOf(requestId) {
  if (!hues.has(requestId)) {
    hues.set(requestId, (199 + hues.size * (360 / NUM_HUES) * 5) % 360);
    if (hues.size > 4096) hues.delete(hues.keys().next().value);
  }
  return `hsl(${hues.get(requestId)} 72% ${colour("--light")})`;
}

// The part of a request's id that tells it from others; the owner is before a slash.
export function shortId(sequence) {
  const id = sequence.request_id.split("/").at(-1);
  const name = id.length > 18 ? `${id.slice(0, 9)}…${id.slice(-6)}` : id;
  return sequence.sample_index ? `${name} #${sequence.sample_index}` : name;
}

// A canvas with one pixel per pixel of the screen. Returns its context, and its size in CSS pixels.
export function prepare(canvas, height = canvas.clientHeight) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return { context, width, height };
}
