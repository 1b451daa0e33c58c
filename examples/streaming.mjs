// A streamed chat with Node.js 18 or newer, without packages. Usage: node streaming.mjs
const url = process.env.QUIRE_BASE_URL ?? "http://localhost:8000";
const response = await fetch(`${url}/v1/chat/completions`, {
  method: "POST",
  headers: { "content-type": "application/json", authorization: `Bearer ${process.env.QUIRE_API_KEY ?? "none"}` },
  body: JSON.stringify({
    messages: [{ role: "user", content: "What does os.path.join do?" }],
    temperature: 0,
    stream: true,
  }),
});
if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);

let pending = "";
for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
  const lines = (pending + text).split("\n");
  pending = lines.pop();
  for (const line of lines) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const event = JSON.parse(line.slice("data: ".length));
    if (event.error) throw new Error(event.error.message);
    process.stdout.write(event.choices[0]?.delta.content ?? "");
  }
}
console.log();
