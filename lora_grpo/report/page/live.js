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
  if (renewCompletions) {
    replaceAround(browser, sections);
    renewCompletions(JSON.parse(parsed.getElementById("data").textContent));
  } else {
    main.replaceChildren(...sections);
    if (document.getElementById("list")) browseData(parsed);
  }
  for (const details of main.querySelectorAll("details")) if (opened.has(nameOf(details))) details.open = true;
  window.scrollTo(0, scrolled);
}

let version = null;
async function refresh() {
  const status = document.getElementById("live");
  try {
    const headers = version === null ? {} : { "If-None-Match": version };
    const response = await fetch(window.location.pathname, { headers, cache: "no-store" });
    if (response.status === 200) {
      const text = await response.text();
      await replacePage(text);
      version = response.headers.get("ETag");
    } else if (response.status !== 304) {
      throw new Error(await response.text());
    }
    status.textContent = `Live, ${new Date().toLocaleTimeString()}`;
    status.className = "";
  } catch (error) {
    status.textContent = error instanceof TypeError ? "No connection: lora-grpo watch has ended" : error.message;
    status.className = "lost";
  }
}

async function keepRefreshing() {
  if (!document.hidden) await refresh();
  setTimeout(keepRefreshing, INTERVAL);
}
setTimeout(keepRefreshing, INTERVAL);
