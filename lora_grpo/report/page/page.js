"use strict";

// A model may write anything: characters that are invisible or move other text are written out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;
function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = visible(String(text));
  if (className) made.className = className;
  return made;
}

const PAGE = 100;

// Shows the completions, and returns a function that shows those of a newer page instead.
function browse(data) {
  const at = Object.fromEntries(data.columns.map((name, index) => [name, index]));
  let rows = data.rows;
  const form = document.querySelector(".filters");
  const list = document.getElementById("list");
  const detail = document.getElementById("detail");
  const [earlier, later] = ["earlier", "later"].map((id) => document.getElementById(id));
  const verdictOf = (row) => (row[at.passed] === null ? "not graded" : row[at.passed] ? "passed" : "failed");
  let matches = [];
  let chosen = 0;
  let reading = false; // whether the reader has chosen a completion
  let searched = null;

  function offer(name, values) {
    const field = form.elements[name];
    const before = field.value;
    field.replaceChildren(field.options[0]); // all
    for (const [value, label] of values) {
      const option = element("option", label ?? value);
      option.value = value;
      field.append(option);
    }
    field.value = before;
  }
  const distinct = (values) => [...new Set(values)];
  function offerFilters() {
    offer("source", distinct(rows.map((row) => row[at.source])).map((value) => [value]));
    const steps = distinct(rows.map((row) => row[at.step])).filter((step) => step !== null);
    offer("step", steps.sort((a, b) => a - b).map((value) => [value]));
    const verdicts = distinct(rows.map(verdictOf)).sort().map((value) => [`verdict ${value}`, value]);
    const statuses = distinct(rows.map((row) => row[at.status])).filter((status) => status !== null && status !== "passed");
    offer("verdict", [...verdicts, ...statuses.sort().map((value) => [`status ${value}`, value])]);
  }

  // The evaluation of the base is before all steps, and that of the trained model after them.
  const stepOf = (row) => row[at.step] ?? (row[at.source] === "trained" ? Infinity : -1);
  const compare = {
    new: (a, b) => stepOf(b) - stepOf(a),
    high: (a, b) => (b[at.reward] ?? -Infinity) - (a[at.reward] ?? -Infinity),
    low: (a, b) => (a[at.reward] ?? Infinity) - (b[at.reward] ?? Infinity),
    long: (a, b) => lengthOf(b) - lengthOf(a),
    short: (a, b) => lengthOf(a) - lengthOf(b),
  };
  function lengthOf(row) {
    return row[at.tokens] ?? row[at.completion].length;
  }
  function textOf(row) {
    const [id, question] = data.problems[row[at.problem]];
    return `${id ?? ""}\n${question ?? ""}\n${row[at.completion]}\n${row[at.extracted] ?? ""}`.toLowerCase();
  }

  function match() {
    const value = (name) => form.elements[name].value;
    const text = value("text").toLowerCase();
    if (text && !searched) searched = new Map(rows.map((row) => [row, textOf(row)]));
    const [source, step, verdict] = [value("source"), value("step"), value("verdict")];
    const least = value("least") === "" ? null : Number(value("least"));
    const most = value("most") === "" ? null : Number(value("most"));
    matches = rows.filter((row) => {
      const reward = row[at.reward];
      return (
        (!source || row[at.source] === source) &&
        (!step || String(row[at.step]) === step) &&
        (!verdict || verdict === `verdict ${verdictOf(row)}` || verdict === `status ${row[at.status]}`) &&
        ((least === null && most === null) || reward !== null) &&
        (least === null || reward >= least) &&
        (most === null || reward <= most) &&
        (!text || searched.get(row).includes(text))
      );
    });
    const order = compare[value("sort")];
    if (order) matches.sort((a, b) => order(a, b) || 0);
    document.getElementById("count").textContent =
      `${matches.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} completions`;
  }

  function filter() {
    match();
    reading = false;
    choose(0, false);
  }

  function renew(newer) {
    const before = reading && matches.length ? identity(matches[chosen]) : null;
    data = newer;
    rows = data.rows;
    searched = null;
    offerFilters();
    match();
    const same = matches.findIndex((row) => identity(row) === before);
    if (same < 0) {
      reading = false;
      choose(0, false);
      return;
    }
    // What is being read stays where it is.
    const scrolled = list.scrollTop;
    chosen = same;
    fill(Math.floor(chosen / PAGE) * PAGE);
    mark();
    list.scrollTop = scrolled;
  }

  function identity(row) {
    const [id] = data.problems[row[at.problem]];
    return JSON.stringify([id, ...["source", "step", "sample_index", "completion"].map((name) => row[at[name]])]);
  }

  function choose(index, follow) {
    chosen = Math.max(0, Math.min(index, matches.length - 1));
    const first = Math.floor(chosen / PAGE) * PAGE;
    if (list.dataset.first !== String(first) || !follow) fill(first);
    const selected = mark();
    if (selected) {
      const above = selected.offsetTop - list.offsetTop;
      if (above < list.scrollTop) list.scrollTop = above;
      if (above + selected.offsetHeight > list.scrollTop + list.clientHeight) {
        list.scrollTop = above + selected.offsetHeight - list.clientHeight;
      }
    }
    show(matches[chosen]);
  }

  function mark() {
    for (const item of list.children) item.setAttribute("aria-selected", String(Number(item.dataset.index) === chosen));
    const selected = list.children[chosen - Number(list.dataset.first)];
    if (selected) list.setAttribute("aria-activedescendant", selected.id);
    return selected;
  }

  function fill(first) {
    list.dataset.first = first;
    list.replaceChildren(
      ...matches.slice(first, first + PAGE).map((row, offset) => {
        const item = element("li");
        item.id = `completion-${first + offset}`;
        item.dataset.index = first + offset;
        item.setAttribute("role", "option");
        const top = element("div", null, "top");
        top.append(element("span", whereOf(row)), badge(row));
        item.append(top, element("div", row[at.completion].slice(0, 160).replace(/\s+/g, " "), "text"));
        return item;
      }),
    );
    list.scrollTop = 0;
    earlier.disabled = first === 0;
    later.disabled = first + PAGE >= matches.length;
    const last = Math.min(first + PAGE, matches.length);
    document.getElementById("place").textContent = matches.length ? `${first + 1}–${last}` : "";
  }

  function whereOf(row) {
    if (row[at.step] !== null) return `${row[at.source]}, step ${row[at.step]}`;
    const index = row[at.sample_index];
    return index === null ? row[at.source] : `${row[at.source]}, ${index === "greedy" ? index : `sample ${index}`}`;
  }

  function badge(row) {
    const verdict = verdictOf(row);
    const status = verdict === "not graded" ? "" : `${verdict === "passed" ? "✓" : "✗"} ${row[at.status] ?? verdict}`;
    const reward = row[at.reward] === null ? "" : `reward ${Number(row[at.reward].toFixed(3))}`;
    return element("span", [status, reward].filter(Boolean).join(", "), { passed: "right", failed: "wrong" }[verdict]);
  }

  function show(row) {
    if (!row) {
      detail.replaceChildren(element("p", "No completion matches."));
      return;
    }
    const [id, question, answer] = data.problems[row[at.problem]];
    const head = element("h3", `${whereOf(row)}${id === null ? "" : ` · ${id}`}`);
    const tokens = row[at.tokens] === null ? "" : `${row[at.tokens]} tokens`;
    const line = element("p", null, "quiet");
    line.append(badge(row), element("span", ` ${[tokens, row[at.truncated] ? "truncated" : ""].filter(Boolean).join(", ")}`));
    const answers = element("div", null, "answers");
    for (const [label, text] of [["Extracted answer", row[at.extracted]], ["Correct answer", answer]]) {
      const part = element("div");
      part.append(element("h4", label), text === null ? element("p", "none", "quiet") : element("pre", text));
      answers.append(part);
    }
    detail.replaceChildren(head, line, element("h4", "Prompt"));
    detail.append(question === null ? element("p", "not recorded", "quiet") : element("pre", question));
    detail.append(element("h4", "Completion"), element("pre", row[at.completion]), answers);
    if (row[at.rewards]) {
      const table = element("table");
      for (const [name, value] of [...data.rewards.map((name, n) => [name, row[at.rewards][n]]), ["weighted sum", row[at.reward]]]) {
        const entry = element("tr");
        const label = element("th", name);
        label.scope = "row";
        entry.append(label, element("td", value === null ? "not graded" : Number(value.toFixed(4))));
        table.append(entry);
      }
      detail.append(element("h4", "Rewards"), table);
    }
  }

  let waiting = 0;
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 60); });
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("submit", (event) => event.preventDefault());
  list.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (!item) return;
    reading = true;
    choose(Number(item.dataset.index), true);
    if (detail.getBoundingClientRect().top > window.innerHeight * 0.8) detail.scrollIntoView({ block: "start" });
  });
  list.addEventListener("keydown", (event) => {
    const to = {
      ArrowDown: chosen + 1, ArrowUp: chosen - 1, PageDown: chosen + PAGE, PageUp: chosen - PAGE,
      Home: 0, End: matches.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    reading = true;
    choose(to, true);
  });
  earlier.addEventListener("click", () => choose(Number(list.dataset.first) - PAGE, true));
  later.addEventListener("click", () => choose(Number(list.dataset.first) + PAGE, true));
  offerFilters();
  filter();
  return renew;
}

let renewCompletions = null;
function browseData(page) {
  renewCompletions = browse(JSON.parse(page.getElementById("data").textContent));
}
// After the first paint, because there may be megabytes of data.
if (document.getElementById("list")) {
  requestAnimationFrame(() => setTimeout(() => renewCompletions || browseData(document)));
}
