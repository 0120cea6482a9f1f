"use strict";
// The browser of rollouts. Texts of models go into the page as text only (textContent), never as HTML.

const ROWS = 25; // groups in the list at a time
const CARDS = 24; // completions shown before one asks for more
const SLICE = 12; // milliseconds of work before the page may answer

const byId = (id) => document.getElementById(id);
const form = byId("filters");
const groups = []; // all that are unpacked
let shown = []; // those that the filters let through
let seen = 0; // how many of `groups` the filters have looked at
let current = 0; // position in `shown`
let displayed = null; // the group that is shown
let arriving = false; // by an address: scroll to the group once it is there
let exact = null; // the problem that the address names, until something else is chosen
let passes = 0; // of the filters over the groups, and
let showings = 0; // of a group; all but the latest give up
let began = performance.now();

/** After a slice of work, let the page answer; whether it did. */
async function breathe() {
  if (performance.now() - began < SLICE) return false;
  await new Promise((resume) => setTimeout(resume));
  began = performance.now();
  return true;
}

/** An element with a class, a text and children. Control characters are shown as their pictures. */
function element(name, className = "", text = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = visible(text);
  made.append(...children);
  return made;
}

const visible = (text) =>
  text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (control) => String.fromCharCode(0x2400 + control.charCodeAt(0)));

const number = (value) => value.toLocaleString("en");
const rounded = (value) => Number(value.toPrecision(3));

// ---- filters

function matches(group, wanted) {
  if (wanted.run && RUNS[group.run] !== wanted.run) return false;
  if (wanted.step && group.step !== Number(wanted.step)) return false;
  if (wanted.problem && !group.problem.includes(wanted.problem)) return false;
  if (wanted.verdict && wanted.verdict !== verdict(group)) return false;
  if (wanted.draw && !group.draws.includes(wanted.draw)) return false;
  if (!wanted.pattern) return true;
  const found = (text) => wanted.pattern.test(text);
  return found(group.prompt) || completions(group, wanted).some((i) => found(group.completion[i]));
}

const rightOnes = (group) => group.correct.filter(Boolean).length;

function verdict(group) {
  const right = rightOnes(group);
  return right === 0 ? "wrong" : right === group.correct.length ? "right" : "mixed";
}

/** Numbers of the group's completions by the wanted draw. */
const completions = (group, wanted) =>
  group.completion.map((_, i) => i).filter((i) => !wanted.draw || group.draws[group.draw[i]] === wanted.draw);

function filters() {
  const wanted = Object.fromEntries(new FormData(form));
  const escaped = wanted.text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return { ...wanted, pattern: wanted.text ? new RegExp(escaped, "i") : null };
}

/** Look at the groups that the filters have not seen yet, then show the list; `restart`: the filters have changed. */
async function advance(restart) {
  const mine = ++passes;
  if (restart) [shown, seen, current, displayed] = [[], 0, 0, null];
  const wanted = filters();
  while (seen < groups.length) {
    const group = groups[seen++];
    if (matches(group, wanted)) shown.push(group);
    if ((await breathe()) && mine !== passes) return;
  }
  if (exact) current = Math.max(0, shown.findIndex((group) => group.problem === exact));
  showList();
  if (shown[current] !== displayed) await showGroup();
  if (mine === passes) byId("list").setAttribute("aria-busy", "false");
}

// ---- the list of groups

function showList() {
  const first = current - (current % ROWS);
  const rows = shown.slice(first, first + ROWS).map((group, i) => {
    const swatch = element("span", "swatch");
    swatch.style.setProperty("--swatch", `var(--run-${OWNERS[group.run]})`);
    const kind = verdict(group) === "mixed" ? "" : verdict(group);
    const share = element("span", kind, `${rightOnes(group)}/${group.correct.length}`);
    const button = element("button", "", "", swatch, element("span", "faint", `step ${group.step}`),
      element("span", "id", group.problem), share);
    button.type = "button";
    button.title = `${RUNS[group.run]}, step ${group.step}, ${group.problem}`;
    button.setAttribute("aria-current", String(first + i === current));
    button.onclick = () => select(first + i);
    return element("li", "", "", button);
  });
  showMap();
  const focused = byId("list").contains(document.activeElement);
  byId("list").replaceChildren(...rows);
  if (focused) byId("list").querySelector("[aria-current=true]")?.focus();
  byId("previous").disabled = current === 0;
  byId("next").disabled = current + 1 >= shown.length;
  byId("earlier").disabled = first === 0;
  byId("later").disabled = first + ROWS >= shown.length;
  const loading = seen < groups.length || chunks.length ? " so far; unpacking …" : "";
  const range = shown.length ? `${number(first + 1)} to ${number(Math.min(first + ROWS, shown.length))} of ` : "";
  const counted = `${range}${number(shown.length)} groups (of ${number(groups.length)} in all)${loading}`;
  byId("count").textContent = groups.length || loading ? counted : "These runs have saved no rollouts.";
}

function select(position) {
  current = Math.max(0, Math.min(position, shown.length - 1));
  exact = null;
  showList();
  showGroup();
}

// ---- the map of a run: mean rewards of its groups, by step

let cells = []; // of the map, by column and row

function showMap() {
  const run = shown[current]?.run, own = shown.filter((group) => group.run === run);
  const steps = [...new Set(own.map((group) => group.step))].sort((a, b) => a - b);
  const problems = new Map([...new Set(own.map((group) => group.problem))].map((problem, i) => [problem, i]));
  const fixed = own.length > 0.2 * steps.length * problems.size; // else most rows would be all but empty
  cells = steps.map(() => []);
  const column = new Map(steps.map((step, i) => [step, i]));
  for (const group of own) {
    const there = cells[column.get(group.step)];
    if (fixed) there[problems.get(group.problem)] = group;
    else there.push(group);
  }
  if (!fixed) for (const there of cells) there.sort((a, b) => b.mean - a.mean);
  const canvas = byId("map").querySelector("canvas"), paint = canvas.getContext("2d");
  canvas.width = steps.length;
  canvas.height = cells.reduce((most, there) => Math.max(most, there.length), 0);
  paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--most");
  const [low, high] = own.reduce(([least, most], { mean }) => [Math.min(least, mean), Math.max(most, mean)], [0, 1]);
  cells.forEach((there, x) => there.forEach((group, y) => {
    paint.globalAlpha = 0.1 + (0.9 * (group.mean - low)) / (high - low);
    paint.fillRect(x, y, 1, 1);
  }));
  byId("map").hidden = steps.length < 2;
  const rows = fixed ? "problems" : "groups, the best on top";
  const caption = `${RUNS[run]}: mean reward of ${rows}, steps ${steps[0]} to ${steps.at(-1)}; from ${low} (pale) to ${high}`;
  byId("map").querySelector("figcaption").textContent = caption;
}

/** The group of the map under the pointer. */
function mapped(event) {
  const box = event.target.getBoundingClientRect();
  const place = (at, size, count) => Math.min(count - 1, Math.floor((at / size) * count));
  const x = place(event.clientX - box.left, box.width, event.target.width);
  return cells[x]?.[place(event.clientY - box.top, box.height, event.target.height)];
}

const map = byId("map").querySelector("canvas");
map.onclick = (event) => mapped(event) && select(shown.indexOf(mapped(event)));
map.onpointermove = (event) => {
  const group = mapped(event);
  tell(event, group ? [`step ${group.step}, ${group.problem}: ${group.mean.toPrecision(3)}`] : []);
};
map.onpointerleave = () => (byId("tip").hidden = true);

// ---- one group

/** Words, single digits and signs, each with the space before it. */
const words = (text) => text.match(/\s*(?:[\p{L}\p{M}]+|[^\s])|\s+$/gu) ?? [];

/** For each word the two words before it, and it. */
const inContext = (text) =>
  text.map(({ word }, i) => `${text[i - 2]?.word ?? ""}\u0001${text[i - 1]?.word ?? ""}\u0001${word}`);

/** The turns of a completion, each with its role, its text and its reward; a single answer is one turn. */
const turns = (group, i) => group.episode[i]?.turns ?? [{ text: group.completion[i] }];

/**
 * How much draws disagree on each word of each completion, from 0 to 3 (the page says what this is).
 * Null if another group is to be shown by now.
 */
async function disagreement(group, mine) {
  const texts = [], sets = [], having = new Map();
  for (const i of group.completion.keys()) {
    texts.push(turns(group, i).flatMap(({ text }, turn) => words(text).map((word) => ({ word, turn }))));
    sets.push(new Set(inContext(texts[i])));
    for (const key of sets[i]) {
      const counts = having.get(key) ?? having.set(key, new Map()).get(key);
      counts.set(group.draw[i], (counts.get(group.draw[i]) ?? 0) + 1);
      counts.set("all", (counts.get("all") ?? 0) + 1);
    }
    if ((await breathe()) && mine !== showings) return null;
  }
  const one = group.draws.length === 1;
  return texts.map((text, i) => {
    const others = group.draw.filter((draw, j) => (one ? j !== i : draw !== group.draw[i])).length;
    return inContext(text).map((key, k) => {
      const counts = having.get(key);
      const agree = counts.get("all") - (one ? 1 : counts.get(group.draw[i]));
      return { ...text[k], level: others ? Math.ceil(3 * (1 - agree / others)) : 0 };
    });
  });
}

/** Words with their marks; neighbours of the same level are one element. */
function marked(found) {
  const pre = element("pre");
  for (let i = 0; i < found.length; ) {
    let text = "";
    const level = found[i].level;
    for (; i < found.length && found[i].level === level; i++) text += found[i].word;
    pre.append(level ? element("mark", `m${level}`, text) : visible(text));
  }
  return pre;
}

/** Where the first call of a tool begins in a reply, after its thoughts; -1: nowhere. */
function firstCall(reply) {
  const thoughts = reply.match(/^[^]*<\/think>/)?.[0].length ?? 0;
  const call = reply.slice(thoughts).search(/<tool_call>|<\|python_tag\|>|^\s*\{/);
  return call < 0 ? -1 : thoughts + call;
}

/** A call, told in a line until one opens it. */
function folded(call) {
  const [, name = "tool", rest = ""] = call.match(/"name"\s*:\s*"([^"]*)"[,\s]*([^\n<]{0,60})/) ?? [];
  const begins = rest.replace(/^"\w+"\s*:\s*/, "").replace(/\}$/, "");
  return element("details", "call", "", element("summary", "", `${name} ${begins} …`));
}

/** An episode as a conversation; calls of tools are folded with their results. */
function conversation(said, found) {
  const made = element("div", "turns"), wordsOf = said.map(() => []);
  for (const word of found) wordsOf[word.turn].push(word);
  let fold = null;
  for (const [k, { role, text, reward }] of said.entries()) {
    const own = wordsOf[k], answered = said[k + 1]?.role === "tool";
    const call = role === "assistant" && answered ? firstCall(text) : -1;
    let at = 0;
    const split = call < 0 ? own.length : own.findIndex(({ word }) => (at += word.length) > call);
    const who = element("div", "faint", "", element("b", "", role), reward ? ` reward ${rounded(reward)}` : "");
    const what = element("div", "", "", ...(split ? [marked(own.slice(0, split))] : []));
    if (role !== "tool") fold = null;
    (fold ?? made).append(element("div", "turn", "", who, what));
    if (call < 0) continue;
    fold = folded(text.slice(call));
    fold.append(marked(own.slice(split)));
    what.append(fold);
  }
  return made;
}

/** An episode as one text, in which the filters search. */
const written = ({ turns }) => turns.map(({ role, text }) => `[${role}] ${text}`).join("\n");

const ENDS = { done: "ended", turns: "cut at max_turns", tokens: "cut at a limit of tokens", failed: "failed" };

/** What there is to say of an episode: its replies, its end, and its environment's numbers. */
const facts = ({ replies, status, metrics }) => [
  `${replies} ${replies === 1 ? "reply" : "replies"}, ${ENDS[status]}`,
  ...Object.entries(metrics).map(([name, value]) => `${name} ${rounded(value)}`),
];

function card(group, i, found, wanted) {
  const right = group.correct[i], episode = group.episode[i];
  const told = [`reward ${group.reward[i]}`, `${number(group.num_tokens[i])} tokens`];
  if (group.finish_reason[i] === "length") told.push("cut");
  if (group.parsed_answer[i] !== null) told.push(`answer ${group.parsed_answer[i]}`);
  if (group.rho[i] != null) told.push(`rho ${group.rho[i].toPrecision(3)}`);
  if (episode) told.push(...facts(episode));
  const bar = element("div", "bar", "", element("b", "", group.draws[group.draw[i]]),
    element("span", right ? "right" : "wrong", `${right ? "✓" : "✗"} ${group.status[i].replaceAll("_", " ")}`),
    ...(corrected(group) ? [badge(group.correction_weight[i])] : []),
    element("span", "faint", told.join(" · ")));
  const made = element("div", "completion", "", bar);
  if (episode?.reason) made.append(element("div", "wrong", `The environment failed: ${episode.reason}`));
  made.append(episode ? conversation(turns(group, i), found) : marked(found));
  if (wanted.pattern?.test(group.completion[i])) made.classList.add("found");
  for (const fold of made.querySelectorAll(".call")) fold.open = wanted.pattern?.test(fold.textContent) ?? false;
  made.id = `completion-${i}`;
  made.style.setProperty("--swatch", drawColour(group.draw[i]));
  return made;
}

/** Colours of draws: paler than any run's, and far apart for neighbours. */
const drawColour = (draw) => `oklch(var(--draw) ${(137.5 * draw + 200) % 360})`;

const corrected = (group) => group.correction_weight.some((weight) => weight != null && weight !== 1);

function badge(weight) {
  if (weight == null) return element("span", "badge", "left out");
  if (weight === 0) return element("span", "badge masked", "masked · weight 0");
  return element("span", "badge", `kept · weight ${weight.toPrecision(3)}`);
}

/** The completions of a group as a grid: a row for each draw, coloured by reward; a cell leads to its completion. */
function grid(group, chosen, show) {
  const made = element("div"), [low, high] = [Math.min(0, ...group.reward), Math.max(1, ...group.reward)];
  made.id = "grid";
  for (const [draw, name] of group.draws.entries()) {
    const own = chosen.filter((i) => group.draw[i] === draw);
    if (!own.length) continue;
    const label = element("span", "", name);
    label.style.setProperty("--swatch", drawColour(draw));
    label.style.gridColumn = 1;
    made.append(label, ...own.map((i, column) => {
      const cell = element("button", "", group.correction_weight[i] === 0 ? "✕" : "");
      cell.type = "button";
      cell.title = `${name}: reward ${group.reward[i]}${group.correction_weight[i] === 0 ? ", masked" : ""}`;
      cell.setAttribute("aria-label", cell.title);
      cell.style.setProperty("--share", `${(100 * (group.reward[i] - low)) / (high - low)}%`);
      cell.style.gridColumn = column + 2;
      cell.onclick = () => show(i);
      return cell;
    }));
  }
  return made;
}

async function showGroup() {
  const mine = ++showings, group = shown[current], place = byId("group");
  displayed = group;
  if (!group) return place.replaceChildren();
  const found = await disagreement(group, mine);
  if (!found || mine !== showings) return;
  const wanted = filters(), chosen = completions(group, wanted);
  const link = element("a", "", "Link to this group");
  link.href = `#rollouts&${new URLSearchParams({ run: RUNS[group.run], step: group.step, problem: group.problem })}`;
  const masked = group.correction_weight.filter((weight) => weight === 0).length;
  const counted = `${rightOnes(group)} of ${group.correct.length} right${masked ? `, ${masked} masked` : ""}`;
  const bar = element("div", "bar", "",
    element("b", "", `${RUNS[group.run]}, step ${group.step}`), element("span", "", group.problem),
    element("span", "faint", counted), link);
  const parts = [bar, element("pre", "prompt", group.prompt)];
  if (group.reference) parts.push(element("div", "faint", `Reference answer: ${group.reference}`));
  const show = (i) => {
    while (!byId(`completion-${i}`)) add();
    byId(`completion-${i}`).scrollIntoView();
  };
  parts.push(grid(group, chosen, show));
  place.replaceChildren(...parts);
  const more = element("button");
  more.type = "button";
  const add = () => {
    const next = chosen.splice(0, CARDS).map((i) => card(group, i, found[i], wanted));
    more.remove();
    place.append(...next);
    more.textContent = `Show ${Math.min(CARDS, chosen.length)} of ${chosen.length} more`;
    if (chosen.length) place.append(more);
  };
  more.onclick = add;
  add();
  if (arriving) byId("rollouts").scrollIntoView();
  arriving = false;
}

// ---- values of curves under the pointer

/** Show the values at the points of `curves` that are nearest to the pointer, from the left. */
function readOff(event, curves) {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(event.currentTarget.getScreenCTM().inverse());
  const digits = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const rows = curves.filter(([run]) => on(run)).map(([run, points]) => {
    const distance = (point) => Math.abs(point[0] - at.x);
    const [, x, y] = points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    const swatch = element("span", "swatch");
    swatch.style.setProperty("--swatch", `var(--run-${run})`);
    return element("div", "", "", swatch, `${METHODS[run]}: ${digits(y)} at ${digits(x)}`);
  });
  tell(event, rows);
}

/** Show lines beside the pointer; none: nothing. */
function tell(event, rows) {
  const tip = byId("tip");
  tip.hidden = !rows.length;
  tip.replaceChildren(...rows);
  tip.style.top = `${event.pageY + 14}px`;
  const most = document.documentElement.clientWidth - tip.offsetWidth - 4;
  tip.style.left = `${Math.max(0, Math.min(event.pageX + 14, most))}px`;
}

/** Whether a run is shown in the figures. */
const on = (run) => document.querySelector(`.legend [data-run="${run}"]`).getAttribute("aria-pressed") === "true";

for (const svg of document.querySelectorAll("figure svg")) {
  const curves = JSON.parse(svg.dataset.curves);
  svg.addEventListener("pointermove", (event) => readOff(event, curves));
  svg.addEventListener("pointerleave", () => (byId("tip").hidden = true));
}

// ---- addresses, and what starts it all

/** Set the filters to those of the page's address, if it has any. */
function readAddress() {
  if (!location.hash.startsWith("#rollouts&")) return false;
  const values = new URLSearchParams(location.hash.slice("#rollouts&".length));
  for (const field of form.elements) {
    if (field.name === "draw" && values.get("draw")) offer(values.get("draw"));
    field.value = values.get(field.name) ?? "";
  }
  exact = values.get("problem");
  arriving = true;
  return true;
}

/** Offer a draw in its filter. */
function offer(draw) {
  if (![...form.elements.draw.options].some((option) => option.value === draw)) {
    form.elements.draw.append(new Option(draw, draw));
  }
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

let typing = 0;
form.addEventListener("input", () => {
  clearTimeout(typing);
  byId("list").setAttribute("aria-busy", "true");
  typing = setTimeout(() => {
    const set = [...new FormData(form)].filter(([, value]) => value);
    history.replaceState(null, "", `#rollouts&${new URLSearchParams(set)}`);
    exact = null;
    advance(true);
  }, 150);
});
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", () => {
  if (readAddress()) advance(true);
});
byId("previous").onclick = () => select(current - 1);
byId("next").onclick = () => select(current + 1);
byId("earlier").onclick = () => select(current - (current % ROWS) - ROWS);
byId("later").onclick = () => select(current - (current % ROWS) + ROWS);
for (const button of document.querySelectorAll(".legend button")) {
  button.onclick = () => {
    const shows = !on(button.dataset.run);
    button.setAttribute("aria-pressed", String(shows));
    const line = `--line-${button.dataset.run}`;
    if (shows) document.documentElement.style.removeProperty(line);
    else document.documentElement.style.setProperty(line, "transparent");
  };
}

readAddress();
const chunks = [...document.querySelectorAll(".chunk")];
(async () => {
  while (chunks.length) {
    const chunk = chunks.shift();
    for (const group of await unpack(chunk.textContent)) {
      group.completion = group.completion.map((text, i) => text ?? written(group.episode[i]));
      group.mean = group.reward.reduce((sum, reward) => sum + reward, 0) / group.reward.length;
      groups.push(group);
      group.draws.forEach(offer);
    }
    chunk.remove();
    await advance(false);
  }
  await advance(false);
  document.body.dataset.ready = "yes";
})();
