"use strict";

// Text of a model enters the page by textContent only. The key stays in its field.

const byId = (id) => document.getElementById(id);
const BAR = 14; // pixels, height of a bar of the timeline
let running = null; // the AbortController of the current text

// ------------------------------------------------------------------------------------------------------ one text

/** The text of one pane: its tokens, its figures, its rounds. */
class Pane {
  constructor(name) {
    this.output = byId(`${name}-output`);
    this.figures = byId(`${name}-figures`);
    this.output.addEventListener("pointerover", (event) => this.choose(this.spans.indexOf(event.target)));
    this.output.addEventListener("keydown", (event) => this.move(event));
    this.clear();
  }

  /** Begin anew. `pairRate` are the pair's tokens/s, to compare with while the text is written. */
  clear(pairRate = 0) {
    this.pairRate = pairRate;
    this.output.textContent = "";
    this.figures.textContent = "–";
    this.spans = [];
    this.details = [];
    this.chosen = -1;
    this.tokens = 0;
    this.rounds = [];
    this.judged = 0;
    this.likely = 0;
    this.began = performance.now();
  }

  /** Add the tokens of a chunk, each with what its round tells about it. */
  add(chunk) {
    const told = new Map();
    for (const round of chunk.rounds) {
      this.rounds.push(round);
      const judged = Math.min(round.accepted + 1, round.drafted.length);
      this.judged += judged;
      for (let i = 0; i < judged; i++) this.likely += round.beta[i] ?? (i < round.accepted ? 1 : 0);
      for (let i = 0; i <= round.accepted; i++) told.set(round.at + i, { round, i });
    }
    chunk.tokens.forEach((text, nth) => {
      const found = told.get(this.tokens);
      const origin = chunk.origins[nth];
      if (found && origin === "correction") {
        const text = found.round.drafted[found.i].replaceAll("\n", "⏎"); // it breaks no line
        this.span(text, "rejected", describe("rejected", found));
      }
      this.span(text, origin, describe(origin, found));
      this.tokens += 1;
    });
    this.show();
  }

  span(text, kind, detail) {
    const span = document.createElement("span");
    span.className = `token ${kind}`;
    span.textContent = text;
    span.title = detail;
    this.spans.push(span);
    this.details.push(detail);
    this.output.append(span);
  }

  get rate() {
    return this.tokens / ((performance.now() - this.began) / 1000);
  }

  show(rate = this.rate) {
    const parts = [`${this.tokens} tokens`, `${rate.toFixed(0)} tokens/s`];
    if (this.judged) {
      const drafted = this.rounds.reduce((sum, round) => sum + round.drafted.length, 0);
      parts.push(`α ${(this.likely / this.judged).toFixed(2)}`, `γ ${(drafted / this.rounds.length).toFixed(1)}`);
    }
    if (this.pairRate && rate) parts.push(`the pair is ${(this.pairRate / rate).toFixed(2)} times as fast`);
    this.figures.textContent = parts.join(" · ");
  }

  choose(nth) {
    if (nth < 0 || nth >= this.spans.length) return;
    this.spans[this.chosen]?.classList.remove("chosen");
    this.chosen = nth;
    this.spans[nth].classList.add("chosen");
    byId("detail").textContent = this.details[nth];
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.spans.length - 1, this.chosen + step)));
    this.spans[this.chosen]?.scrollIntoView({ block: "nearest" });
  }
}

const chance = (value) => (value === undefined ? "unknown" : value < 0.0005 ? value.toExponential(1) : value.toFixed(3));

/** One line about a token: its origin, p, q and β. */
function describe(kind, found) {
  const names = {
    draft: "accepted draft token",
    rejected: "rejected draft token",
    correction: "the target's token, in place of the rejected one",
    target: "the target's own token",
  };
  if (!found) return names[kind];
  const { round, i } = found;
  const parts = [`${names[kind]}, round ${round.number}`];
  if (kind === "draft" || kind === "rejected") {
    parts.push(`p ${chance(round.p[i])}`, `q ${chance(round.q[i])}`);
    if (round.beta[i] !== undefined) parts.push(`β ${chance(round.beta[i])}: the chance of any draft here`);
  }
  return parts.join(" · ");
}

// ---------------------------------------------------------------------------------------------------- the timeline

/** Draw each round as bars: a row for the draft, a row for the way and the verifier. Times are microseconds. */
function drawTimeline(rounds) {
  const svg = byId("timeline");
  svg.replaceChildren();
  if (!rounds.length) return;
  const last = rounds[rounds.length - 1];
  const begin = rounds[0].start_us;
  const length = Math.max(1, last.sent_us + last.verdict_us - begin);
  const width = Math.max(300, Math.min(30 * rounds.length, 20000), svg.parentElement.clientWidth - 4);
  svg.setAttribute("width", width);
  svg.setAttribute("height", 2 * BAR + 12);
  const bar = (row, phase, from, micros, round) => {
    if (micros <= 0) return;
    const rect = document.createElementNS(svg.namespaceURI, "rect");
    rect.setAttribute("class", `phase-${phase}`);
    rect.setAttribute("x", ((from - begin) / length) * width);
    rect.setAttribute("y", 4 + row * (BAR + 4));
    rect.setAttribute("width", Math.max(0.5, (micros / length) * width));
    rect.setAttribute("height", BAR);
    const title = document.createElementNS(svg.namespaceURI, "title");
    title.textContent = `round ${round.number}: ${phase} ${(micros / 1000).toFixed(2)} ms, ` +
      `${round.accepted} of ${round.drafted.length} accepted`;
    rect.append(title);
    svg.append(rect);
  };
  for (const round of rounds) {
    bar(0, "draft", round.start_us, round.sent_us - round.start_us, round);
    const parts = { queue: round.queue_us, pass: round.forward_us, verify: round.verify_us };
    const wire = Math.max(0, round.verdict_us - parts.queue - parts.pass - parts.verify);
    let at = round.sent_us;
    for (const [phase, micros] of [["wire", wire / 2], ...Object.entries(parts), ["wire", wire / 2]]) {
      bar(1, phase, at, micros, round);
      at += micros;
    }
  }
}

// -------------------------------------------------------------------------------------------------------- requests

/** The request of the form; empty fields are left to the server. */
function request(alone) {
  const body = { prompt: byId("prompt").value, alone };
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "gamma", "seed"]) {
    const text = byId(name).value;
    if (text !== "" && !(alone && name === "gamma")) body[name] = Number(text);
  }
  return body;
}

/** POST, and call `handle` with each event of the answer. */
async function write(body, handle, signal) {
  const headers = { "content-type": "application/json" };
  const key = byId("key").value;
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch("playground/generate", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      handle(event);
    }
  }
}

/** Write one text into a pane; return its tokens per second. */
async function fill(pane, alone, signal, pairRate = 0) {
  pane.clear(pairRate);
  let rate = 0;
  await write(request(alone), (event) => {
    if (event.type === "started") {
      byId("models").textContent = `target ${event.target} · draft ${event.draft} · rule ${event.rule}`;
    } else if (event.type === "chunk") {
      pane.add(event);
      if (!alone) drawTimeline(pane.rounds);
    } else {
      rate = event.tokens_per_second;
      pane.show(rate);
    }
  }, signal);
  return rate;
}

function say(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", isError);
}

async function run(panes) {
  if (running) return;
  running = new AbortController();
  byId("write").disabled = true;
  byId("stop").disabled = false;
  panes.alone.clear();
  try {
    say("Writing with the draft…");
    const rate = await fill(panes.pair, false, running.signal);
    if (byId("compare").checked) {
      say("Writing by the target alone…");
      const alone = await fill(panes.alone, true, running.signal, rate);
      say(alone > 0 ? `The pair wrote ${(rate / alone).toFixed(2)} times as fast as the target alone.` : "");
    } else {
      say("");
    }
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  } finally {
    running = null;
    byId("write").disabled = false;
    byId("stop").disabled = true;
  }
}

const panes = { pair: new Pane("pair"), alone: new Pane("alone") };
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run(panes);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("rejected").addEventListener("change", (event) => {
  document.body.classList.toggle("hide-rejected", !event.target.checked);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && event.ctrlKey) run(panes);
});
