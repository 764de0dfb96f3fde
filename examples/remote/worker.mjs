// A FlowFabric worker in Node (18 or newer) that needs no packages: node worker.mjs
import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

const url = process.env.FF_URL ?? "http://127.0.0.1:9090";
const me = `${hostname()}-${process.pid}`, ttl = 30_000, slots = 4;
const headers = { "content-type": "application/json" };
if (process.env.FF_API_TOKEN) headers.authorization = `Bearer ${process.env.FF_API_TOKEN}`;
const tasks = { // The arguments arrive as an array; the return value is the result.
  shout: async ([text], { frames }) => {
    await frames([{ text: `shouting ${text}` }]);
    return text.toUpperCase();
  },
  refuse: async () => { throw new Error("not today"); },
};

async function post(path, body) { // Retries until it gets a response, which is safe.
  for (let pause = 100; ; pause = Math.min(pause * 2, 5000)) {
    const sent = { method: "POST", headers, body: JSON.stringify(body) };
    const answer = await fetch(url + path, sent).catch(() => null);
    if (answer && !answer.ok && answer.status < 500 && answer.status !== 429) throw Error(await answer.text());
    const found = answer?.ok && await answer.json().catch(() => null);
    if (found && !found.results?.some((row) => row.status >= 500 && row.retryable)) return found;
    await sleep(pause);
  }
}

const held = new Map(); // Running tasks: handle → AbortController.
async function run(claim) {
  const { handle, execution_kind: kind } = claim, { signal } = held.get(handle);
  let seq = claim.seq_base; // Numbers each frame, so that a repeat is not written twice.
  const frames = (list) => post("/v1/remote/frames", { items: [{ handle, frames: list, seq: seq += list.length }] });
  try {
    const args = JSON.parse(Buffer.from(claim.payload_b64, "base64").toString() || "[]");
    const result = JSON.stringify(await tasks[kind](args, { claim, signal, frames }));
    const item = { handle, result_encoding: "json", result_b64: Buffer.from(result).toString("base64") };
    if (!signal.aborted) await post("/v1/remote/complete", { items: [item] });
  } catch (error) {
    if (!signal.aborted) await post("/v1/remote/fail", { items: [{ handle, reason: error.message }] });
  } finally { held.delete(handle); }
}

const renewing = setInterval(async () => {
  const handles = [...held.keys()];
  if (!handles.length) return;
  const { results } = await post("/v1/remote/renew", { items: handles.map((handle) => ({ handle })) });
  results.forEach((row, i) => row.status >= 400 && held.get(handles[i])?.abort()); // The lease is lost: stop.
}, ttl / 3);

let stopping = false;
process.on("SIGTERM", () => { stopping = true; });
console.log(`worker ${me} serves ${Object.keys(tasks).join(", ")}`);
while (!stopping) {
  if (held.size >= slots) { await sleep(20); continue; }
  const ask = { worker_instance_id: me, tasks: Object.keys(tasks), max: slots - held.size };
  Object.assign(ask, { lease_ttl_ms: ttl, request_id: randomUUID() });
  const { claims, draining } = await post("/v1/remote/claim?wait_ms=2000", ask);
  for (const claim of claims) { held.set(claim.handle, new AbortController()); run(claim); }
  stopping ||= draining; // An operator is draining this worker.
}
while (held.size) await sleep(20);
clearInterval(renewing);
await post("/v1/remote/claim", { worker_instance_id: me, leaving: true });
