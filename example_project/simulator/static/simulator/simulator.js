// The page of the simulator: requests events from the server, and shows them.

import { Timeline } from "./timeline.js";

const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

const start = JSON.parse(one("#start").textContent);
const form = one("#switches");
const timeline = new Timeline(one("#timeline"), one("#scroll"));
const calm = matchMedia("(prefers-reduced-motion: reduce)");

const BEGINNING = "Press Play, or Step for one step at a time, and see what happens.";
const BY_HAND = "Have a client acquire the lock, and see what happens.";
const IMPOSSIBLE = "This can't be played here. Choose another lock service, or another scenario.";
const SILENCE = "The server doesn't answer. Is it still running?";

const MOST = 2000; // the number of events that are kept

let run = 0;
let state = null;
let events = [];
let offset = 0; // of the server's clock: seconds since the run began, minus ours
let asking = null;

try {
  // The theme chosen in the admin.
  document.documentElement.dataset.theme = localStorage.getItem("theme") || "auto";
} catch {
  // Storage is disabled.
}

// Requests

async function post(url, facts = {}) {
  const body = new URLSearchParams({ ...facts, csrfmiddlewaretoken: form.csrfmiddlewaretoken.value });
  const answer = await fetch(url, { method: "POST", body, credentials: "same-origin" });
  if (answer.ok) {
    complain("");
    return answer.json();
  }
  const text = await answer.text();
  let said = text.slice(0, 300);
  try {
    said = JSON.parse(text).error;
  } catch {
    if (answer.status === 403 && text.includes("CSRF")) said = "The page is out of date. Reload it.";
  }
  complain(said);
  return null;
}

async function begin(trouble = "") {
  asking?.abort();
  const plan = Object.fromEntries(new FormData(form));
  const begun = await post(start.urls.start, plan);
  if (!begun) return;
  run = begun.run;
  events = [];
  complain(trouble);
  follow(run);
}

async function follow(mine) {
  let version = 0;
  while (mine === run) {
    asking = new AbortController();
    const after = events.at(-1)?.seq ?? 0;
    const query = new URLSearchParams({ run: mine, version, after });
    let told;
    try {
      const answer = await fetch(`${start.urls.events}?${query}`, { signal: asking.signal });
      if (answer.status === 410) {
        if (mine === run) complain("The simulation has ended because its page was closed. Restart it.");
        return;
      }
      told = await answer.json();
    } catch {
      if (asking.signal.aborted || mine !== run) return;
      complain(SILENCE);
      await new Promise((resolve) => setTimeout(resolve, 2000));
      continue;
    }
    if (mine !== run) return;
    if (one("#trouble").textContent === SILENCE) complain("");
    if (told.run !== mine) {
      // Another tab of this browser has restarted: both share one simulation.
      run = mine = told.run;
      events = [];
      for (const [key, value] of Object.entries(told.plan)) form.elements[key].value = value;
      showAbout();
    }
    version = told.version;
    show(told);
    if (told.closed) {
      complain(told.trouble || "The simulation has ended. Restart it.");
      return;
    }
  }
}

// Showing

function show(told) {
  state = told;
  offset = told.now - performance.now() / 1000;
  const fresh = told.events;
  events.push(...fresh);
  if (events.length > MOST) events.splice(0, events.length - MOST);
  const reading = one("#reading");
  const beginning = told.obstacle ? IMPOSSIBLE : told.script.steps.length ? BEGINNING : BY_HAND;
  const words = told.reading?.text ?? beginning;
  if (reading.textContent !== words) reading.textContent = words;
  reading.dataset.tone = told.reading?.tone ?? "";
  showScore(told.score);
  showScript(told);
  told.clients.forEach(showClient);
  showLog(fresh);
  const why = one("#why-no-cut");
  why.textContent = told.why_no_cut && `Cut off isn't offered: ${told.why_no_cut}`;
  why.hidden = !told.why_no_cut;
  draw();
}

function showScore(score) {
  for (const [key, value] of Object.entries(score)) {
    const place = one(`#score-${key}`);
    place.textContent = value ?? "–";
    if (key === "lost") place.classList.toggle("bad", value > 0);
  }
}

function showScript({ script, obstacle, trouble }) {
  const playing = script.doing === "play";
  const steps = script.steps.length;
  one("#play .word").textContent = playing ? "Stop" : "Play";
  one("#play [aria-hidden]").textContent = playing ? "■" : "▶";
  allow(one("#play"), playing || (!script.doing && !script.finished && !obstacle));
  allow(one("#step"), !script.doing && !script.finished && !obstacle);
  one(".player").dataset.finished = script.finished && steps > 0 ? "yes" : "";
  const next = one("#next");
  if (!steps) next.textContent = "No script. Use the buttons of the clients.";
  else if (script.finished) next.textContent = "The scenario is over.";
  else next.textContent = `${script.doing ? "Now" : "Next"}, ${script.done + 1} of ${steps}: ${script.steps[script.done]}.`;
  one("#play").hidden = one("#step").hidden = one("#script").hidden = !steps;
  const list = one("#steps");
  if (list.dataset.run !== String(run)) {
    list.dataset.run = run;
    list.replaceChildren(...script.steps.map((caption) => element("li", { textContent: caption })));
  }
  all("li", list).forEach((item, index) => {
    item.classList.toggle("done", index < script.done);
    if (index === script.done) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
  });
  one("#obstacle").textContent = obstacle;
  one("#obstacle").hidden = !obstacle;
  if (trouble) complain(trouble);
}

function showClient(client) {
  const card = one(`[data-client="${client.name}"]`);
  const counts = client.holds ? `; read ${client.value}` : "";
  one(".words", card).textContent = client.words + counts;
  one(".pid", card).textContent = client.pid ? `process ${client.pid}` : "";
  card.toggleAttribute("data-believes", client.believes);
  const focused = document.activeElement?.dataset?.action;
  const mine = card.contains(document.activeElement);
  for (const button of all("[data-action]", card)) {
    const why = client.why_not[button.dataset.action];
    allow(button, !why, why);
  }
  one(".pair", card).hidden = client.paused;
  one('[data-action="wake"]', card).hidden = !client.paused;
  one('[data-action="cut"]', card).hidden = client.cut;
  one('[data-action="mend"]', card).hidden = !client.cut;
  // The focused button was replaced by its opposite.
  const opposite = { pause: "wake", wake: "pause", cut: "mend", mend: "cut" }[focused];
  const visible = (button) => button.offsetParent !== null;
  if (mine && opposite && !visible(one(`[data-action="${focused}"]`, card))) {
    one(`[data-action="${opposite}"]`, card).focus();
  }
}

function showLog(fresh) {
  const log = one("#log");
  if (log.dataset.run !== String(run)) {
    log.dataset.run = run;
    log.replaceChildren();
  }
  for (const event of fresh) {
    if (!event.text) continue;
    const item = element("li");
    item.dataset.tone = event.tone ?? "";
    if (event.message) item.title = event.message;
    item.append(
      element("time", { textContent: `${event.at.toFixed(1)} s` }),
      element("span", { textContent: event.text }),
    );
    log.prepend(item);
  }
}

function draw() {
  if (!state) return;
  const last = events.at(-1)?.at ?? 0;
  const now = state.live ? offset + performance.now() / 1000 : Math.max(last + 0.6, 0.6);
  timeline.draw(events, Math.max(now, last));
}

function complain(words) {
  const place = one("#trouble");
  place.textContent = words;
  place.hidden = !words;
}

function allow(button, may, why = "") {
  button.setAttribute("aria-disabled", String(!may));
  button.title = why;
}

function element(name, properties = {}) {
  return Object.assign(document.createElement(name), properties);
}

// Input

function onPress(button, act) {
  button.addEventListener("click", () => {
    if (button.getAttribute("aria-disabled") !== "true") act();
  });
}

onPress(one("#play"), () => post(start.urls.script, { do: state?.script.doing === "play" ? "stop" : "play" }));
onPress(one("#step"), () => post(start.urls.script, { do: "step" }));
onPress(one("#again"), () => begin());

for (const card of all("[data-client]")) {
  for (const button of all("[data-action]", card)) {
    const action = button.dataset.action;
    onPress(button, () => {
      const facts = { client: card.dataset.client, action };
      if (action === "pause") facts.seconds = one("select", card).value;
      post(start.urls.act, facts);
    });
  }
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", (event) => {
  if (event.target.name === "scenario") {
    // A new scenario sets its own defaults.
    const suits = start.defaults[event.target.value];
    for (const key of ["backend", "fencing"]) {
      const value = suits[key];
      const choice = one(`option[value="${value}"]`, form.elements[key]);
      if (choice && !choice.disabled) form.elements[key].value = value;
    }
  }
  showAddress();
  begin();
});

function showAddress() {
  const query = new URLSearchParams(new FormData(form));
  query.delete("csrfmiddlewaretoken");
  history.replaceState(null, "", `?${query}`);
  showAbout();
}

function showAbout() {
  one("#about").textContent = start.defaults[form.elements.scenario.value].about;
  const [label, means] = start.fencings[form.elements.fencing.value];
  one("#fencing-label").textContent = label === "Off" ? "No fencing" : `${label} fencing`;
  one("#fencing-means").textContent = means;
}

addEventListener("pagehide", () => {
  const csrfmiddlewaretoken = form.csrfmiddlewaretoken.value;
  navigator.sendBeacon(start.urls.end, new URLSearchParams({ run, csrfmiddlewaretoken }));
});
addEventListener("pageshow", (event) => event.persisted && begin());

setInterval(() => state?.live && !document.hidden && draw(), calm.matches ? 1000 : 100);
addEventListener("resize", draw);
showAbout();
begin(one("#trouble").textContent);
