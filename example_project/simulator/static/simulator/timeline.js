// Draws events as lanes: the holder according to the lock service, what each client believed, and
// the counter. The clock is the server's.

const NAMES = ["A", "B", "C", "D"];
const TOP = 24;
const SERVICE = 36;
const LANE = 44;
const HEIGHT = TOP + SERVICE + NAMES.length * LANE + SERVICE;
const LONGEST = 120; // seconds that are drawn
const LEAST = 26; // pixels for a second
const MOST = 90;

const laneTop = (who) => TOP + SERVICE + NAMES.indexOf(who) * LANE;
const counterTop = TOP + SERVICE + NAMES.length * LANE;

// The events as bars with a beginning and an end (null: not yet), and marks.
export function model(events) {
  const found = { service: [], leases: [], waits: [], pauses: [], cuts: [], marks: [], values: [] };
  const open = {};
  const begin = (list, who, at, facts = {}) => {
    const bar = { who, from: at, to: null, ...facts };
    found[list].push(bar);
    (open[list] ??= {})[who] = bar;
  };
  const end = (list, who, at) => {
    const bar = open[list]?.[who];
    if (bar) {
      bar.to = at;
      delete open[list][who];
    }
    return bar;
  };
  for (const event of events) {
    const { who, at, kind } = event;
    if (kind === "service") {
      end("service", "", at);
      if (event.token !== null) begin("service", "", at, { token: event.token });
    } else if (kind === "waits") {
      begin("waits", who, at);
    } else if (kind === "acquired") {
      end("waits", who, at);
      end("leases", who, at);
      begin("leases", who, at, { token: event.token, over: [] });
    } else if (kind === "ran_out") {
      const lease = open.leases?.[who];
      if (lease) lease.over.push({ from: at, to: null });
    } else if (kind === "renewed") {
      const last = open.leases?.[who]?.over.at(-1);
      if (last && last.to === null) last.to = at;
    } else if (kind === "lost" || kind === "released" || kind === "dropped") {
      end("leases", who, at);
    } else if (kind === "gave_up" || kind === "failed") {
      end("waits", who, at);
    } else if (kind === "paused") {
      begin("pauses", who, at);
    } else if (kind === "woke") {
      end("pauses", who, at);
    } else if (kind === "cut") {
      begin("cuts", who, at);
    } else if (kind === "mended") {
      end("cuts", who, at);
    } else if (kind === "ended") {
      for (const list of ["leases", "waits", "pauses", "cuts"]) end(list, who, at);
      found.marks.push(event);
    } else if (kind === "emptied") {
      found.marks.push(event);
    }
    if (kind === "wrote" || kind === "refused") found.marks.push(event);
    if (kind === "wrote") {
      end("values", "", at);
      begin("values", "", at, { value: event.value, bad: event.overwrote });
    }
  }
  return found;
}

export class Timeline {
  constructor(svg, scroll) {
    this.svg = svg;
    this.scroll = scroll;
    this.follows = true;
    scroll.addEventListener("scroll", () => {
      this.follows = scroll.scrollLeft + scroll.clientWidth > scroll.scrollWidth - 40;
    });
  }

  draw(events, now) {
    const played = events.filter((event) => !["starting", "ready"].includes(event.kind));
    const origin = Math.max(-0.3, now - LONGEST); // room for the first mark
    const length = now - origin + 0.4;
    const room = this.scroll.clientWidth;
    const scale = Math.min(MOST, Math.max(LEAST, room / Math.max(length, 8)));
    const width = Math.max(room, Math.ceil(length * scale));
    this.x = (at) => (at - origin) * scale;
    this.now = now;
    const empty = played.length === 0;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", HEIGHT);
    this.parts = [DEFINITIONS];
    this.#grid(width, scale, origin, empty);
    if (!empty) {
      const found = model(played);
      for (const [name, list] of Object.entries(found)) {
        found[name] = list.filter((each) => (name === "marks" ? this.x(each.at) > 0 : this.#shows(each)));
      }
      this.#service(found.service);
      for (const bar of found.pauses) this.#pause(bar);
      for (const bar of found.waits) this.#wait(bar);
      for (const bar of found.leases) this.#lease(bar, found.marks);
      for (const bar of found.cuts) this.#cut(bar, found.pauses);
      this.#values(found.values);
      for (const mark of found.marks) this.#mark(mark);
      this.#line("now", this.x(now), TOP - 4, this.x(now), HEIGHT);
    }
    this.svg.innerHTML = this.parts.join("");
    if (this.follows) this.scroll.scrollLeft = this.scroll.scrollWidth;
  }

  #grid(width, scale, origin, empty) {
    for (let y = TOP, row = 0; row <= 6; row += 1) {
      this.#line("lane", 0, y, width, y);
      y += row === 0 || row === 5 ? SERVICE : LANE;
    }
    if (empty) return;
    for (let second = Math.ceil(origin); (second - origin) * scale < width; second += 1) {
      const x = this.x(second);
      this.#line("tick", x, TOP - 4, x, HEIGHT);
      if (scale >= 40 || second % 2 === 0) this.#text("second", x + 3, TOP - 9, `${second} s`);
    }
  }

  #service(bars) {
    for (const bar of bars) {
      const [x, w] = this.#span(bar);
      this.#rect("held", x, TOP + 8, w, SERVICE - 16);
      if (w > 16) this.#text("", x + 5, TOP + 22, w > 62 ? `token ${bar.token}` : bar.token);
    }
  }

  #lease(bar, marks) {
    const y = laneTop(bar.who) + 14;
    const [x, w] = this.#span(bar);
    this.#rect("lease", x, y, w, 22);
    const first = bar.over[0] ? this.x(bar.over[0].from) - x : w;
    const near = (mark) => mark.who === bar.who && mark.at >= bar.from && this.x(mark.at) < x + 64;
    if (first > 16) {
      const short = first < 62 || marks.some(near);
      this.#text("on-lease", x + 6, y + 15, short ? bar.token : `token ${bar.token}`);
    }
    for (const over of bar.over) {
      const [from, width] = this.#span({ from: over.from, to: over.to ?? bar.to });
      this.#rect("over", from, y, width, 22);
      if (width > 90) this.#text("on-over", from + 8, y + 15, "expired");
    }
  }

  #wait(bar) {
    const y = laneTop(bar.who) + 17;
    const [x, w] = this.#span(bar);
    this.#rect("waiting", x, y, w, 16);
    if (w > 44) this.#text("second", x + 6, y + 12, "waits");
  }

  #pause(bar) {
    const y = laneTop(bar.who) + 1;
    const [x, w] = this.#span(bar);
    this.#rect("paused", x, y, w, LANE - 2, 0);
    if (w > 60) this.#text("on-pause", x + 5, y + 10, "paused");
  }

  #cut(bar, pauses) {
    const y = laneTop(bar.who) + LANE - 4;
    const [x, w] = this.#span(bar);
    this.#line("cut", x, y, x + w, y);
    const covers = (pause) =>
      pause.who === bar.who && this.x(pause.from) < x + 44 && this.x(pause.to ?? this.now) > x;
    if (w > 50 && !pauses.some(covers)) {
      this.#text("on-cut", x + 2, laneTop(bar.who) + 11, "cut off");
    }
  }

  #values(bars) {
    const first = { from: 0, to: bars[0]?.from ?? null, value: 0, first: true };
    for (const bar of this.#shows(first) ? [first, ...bars] : bars) {
      const [x, w] = this.#span(bar);
      const kind = bar.bad ? "value bad" : bar.first ? "value first" : "value";
      this.#rect(kind, x, counterTop + 7, w, SERVICE - 14);
      if (w > 10) this.#text(bar.bad ? "bad" : "", x + 4, counterTop + 22, bar.value);
    }
  }

  #mark(event) {
    const x = this.x(event.at);
    if (event.kind === "emptied") {
      this.#line("dead", x, TOP + 2, x, TOP + SERVICE - 2);
      this.#text("bad", x + 5, TOP + 22, "emptied");
      return;
    }
    const y = laneTop(event.who) + 25;
    if (event.kind === "ended") {
      this.#line("dead", x, y - 16, x, y + 16);
      this.#text("bad", x + 5, y + 4, "killed");
      return;
    }
    if (event.kind === "wrote") this.#line("drop", x, y, x, counterTop + 7);
    const title = `<title>${escape(event.text)}</title>`;
    if (event.kind === "refused") {
      this.parts.push(
        `<g>${title}<circle class="refused-bg" cx="${x}" cy="${y}" r="9.5"/>` +
          `<path class="refused" d="M${x - 4} ${y - 4}l8 8m0-8l-8 8"/></g>`,
      );
    } else if (event.stale) {
      this.parts.push(
        `<path class="stale" d="M${x} ${y - 10}l10 10l-10 10l-10-10Z">${title}</path>`,
      );
    } else {
      this.parts.push(`<circle class="wrote" cx="${x}" cy="${y}" r="7">${title}</circle>`);
    }
  }

  #shows(bar) {
    return bar.to === null || this.x(bar.to) > 0;
  }

  #span(bar) {
    // Bars that began earlier begin at the left edge.
    const from = Math.max(-3, this.x(bar.from));
    return [from, Math.max(2, this.x(Math.max(bar.from, bar.to ?? this.now)) - from)];
  }

  #rect(kind, x, y, width, height, rx = 3) {
    this.parts.push(
      `<rect class="${kind}" x="${x.toFixed(1)}" y="${y}" width="${width.toFixed(1)}" ` +
        `height="${height}" rx="${rx}"/>`,
    );
  }

  #line(kind, x1, y1, x2, y2) {
    this.parts.push(
      `<line class="${kind}" x1="${x1.toFixed(1)}" y1="${y1}" x2="${x2.toFixed(1)}" y2="${y2}"/>`,
    );
  }

  #text(kind, x, y, words) {
    this.parts.push(
      `<text class="${kind}" x="${x.toFixed(1)}" y="${y}">${escape(String(words))}</text>`,
    );
  }
}

const DEFINITIONS =
  '<defs><pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" ' +
  'patternTransform="rotate(45)"><rect class="stripe-bg" width="7" height="7"/>' +
  '<line class="stripe" x1="0" y1="0" x2="0" y2="7" stroke-width="3"/></pattern></defs>';

function escape(text) {
  const codes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return text.replace(/[&<>"]/g, (character) => codes[character]);
}
