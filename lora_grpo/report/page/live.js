"use strict";

// The page of `lora-grpo watch`: asks the server for a newer page, and keeps what the reader has opened and chosen.
const INTERVAL = 3000; // milliseconds

// The sections around the completions, which update themselves.
function replaceAround(browser, sections) {
  for (const section of [...browser.parentElement.children]) if (section !== browser) section.remove();
  const place = sections.findIndex((section) => section.id === browser.id);
  browser.before(...sections.slice(0, place));
  browser.after(...sections.slice(place + 1));
}

const nameOf = (details) => details.querySelector("summary").textContent.replace(/\d+/g, "");

async function replacePage(text) {
  const parsed = new DOMParser().parseFromString(text, "text/html");
  const header = document.importNode(parsed.querySelector("header"), true);
  const sections = [...document.importNode(parsed.querySelector("main"), true).children];
  const images = sections.flatMap((section) => [...section.querySelectorAll("img")]);
  await Promise.all(images.map((image) => image.decode().catch(() => null))); // or the page would flicker

  const opened = new Set([...document.querySelectorAll("details[open]")].map(nameOf));
  const scrolled = window.scrollY;
  const main = document.querySelector("main");
  const browser = document.getElementById("browser");
  document.querySelector("header").replaceWith(header);
  if (renewCompletions && parsed.getElementById("list")) {
    replaceAround(browser, sections);
    browser.querySelector("p").replaceWith(document.importNode(parsed.querySelector("#browser p"), true)); // how many
    renewCompletions(JSON.parse(parsed.getElementById("data").textContent));
  } else {
    // There are no completions yet. A run that starts again in its folder has none, either.
    main.replaceChildren(...sections);
    renewCompletions = null;
    if (document.getElementById("list")) browseData(parsed);
  }
  for (const details of main.querySelectorAll("details")) if (opened.has(nameOf(details))) details.open = true;
  window.scrollTo(0, scrolled);
}

function tell(text, isLost) {
  const status = document.getElementById("live");
  status.textContent = text;
  status.className = isLost ? "lost" : "";
}

let version = null;
async function refresh() {
  const headers = version === null ? {} : { "If-None-Match": version };
  let response;
  let text;
  try {
    response = await fetch(window.location.pathname, { headers, cache: "no-store" });
    text = await response.text();
  } catch {
    tell("No connection: lora-grpo watch has ended", true);
    return;
  }
  if (response.status === 200) {
    await replacePage(text);
    version = response.headers.get("ETag");
  } else if (response.status !== 304) {
    tell(text, true);
    return;
  }
  tell(`Live, ${new Date().toLocaleTimeString()}`, false);
}

async function keepRefreshing() {
  try {
    if (!document.hidden) await refresh();
  } finally {
    setTimeout(keepRefreshing, INTERVAL);
  }
}
setTimeout(keepRefreshing, INTERVAL);
