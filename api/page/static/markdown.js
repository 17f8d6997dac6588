// Markdown as models write it, into DOM nodes. Raw HTML stays text, images become links, and a link may only lead to
// http, https or mailto. Unknown syntax is text: nothing is ever lost.
import { copy, el } from "./dom.js";
import { highlight } from "./highlight.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const MAX_DEPTH = 8; // of nested quotes, lists and emphasis; deeper ones stay text

// Brings `target` up to date with `text`. Blocks whose source has not changed keep their nodes, so that a long answer
// costs no more a token than a short one, and a selection in it stays.
export function render(target, text) {
  const blocks = split(text.replaceAll("\r\n", "\n").split("\n"));
  const shown = [...target.children];
  blocks.forEach((block, i) => {
    const source = block.join("\n");
    if (shown[i]?.source === source) return;
    const node = build(block, 0);
    node.source = source;
    if (shown[i]) shown[i].replaceWith(node);
    else target.append(node);
  });
  shown.slice(blocks.length).forEach((node) => node.remove());
}

// Lines -> blocks of lines.
function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const end = endOf(lines, at);
    blocks.push(lines.slice(at, end));
    at = end;
  }
  return blocks;
}

function endOf(lines, start) {
  const fence = FENCE.exec(lines[start]);
  let end = start + 1;
  if (fence) {
    const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
    while (end < lines.length && !close.test(lines[end])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[start]) || RULE.test(lines[start])) return end;
  if (ITEM.test(lines[start])) {
    const belongs = (line) => ITEM.test(line) || /^\s{2,}\S/.test(line);
    while (end < lines.length && (belongs(lines[end]) || (!lines[end].trim() && belongs(lines[end + 1] ?? "")))) end += 1;
    return end;
  }
  if (QUOTE.test(lines[start])) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return end;
  }
  const starts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || QUOTE.test(line);
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
  return end;
}

function build(lines, depth) {
  const first = lines[0];
  const fence = FENCE.exec(first);
  if (fence) return codeBlock(lines, fence);
  const heading = HEADING.exec(first);
  if (heading) return inline(el(`h${Math.min(6, heading[1].length + 2)}`, { class: "head" }), heading[2], depth);
  if (RULE.test(first)) return el("hr");
  if (depth < MAX_DEPTH && ITEM.test(first)) return list(lines, depth);
  if (depth < MAX_DEPTH && QUOTE.test(first)) {
    return el("blockquote", {}, ...split(lines.map((line) => line.replace(QUOTE, ""))).map((part) => build(part, depth + 1)));
  }
  if (lines.length > 1 && first.includes("|") && TABLE_LINE.test(lines[1])) return table(lines, depth);
  return inline(el("p"), lines.join("\n"), depth);
}

function codeBlock(lines, fence) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const button = el("button", { type: "button", class: "quiet tiny", onclick: () => copy(code, button) }, "Copy");
  const head = el("div", {}, fence[2].trim(), button);
  return el("div", { class: "block" }, head, el("pre", { tabindex: "0" }, el("code", {}, ...highlight(code, fence[2].trim()))));
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([item[3]]);
    else items.at(-1).push(line.replace(/^(\t| {1,4})/, ""));
  }
  const start = ordered ? Number.parseInt(mark, 10) : 1;
  return el(ordered ? "ol" : "ul", { start: start === 1 ? null : start }, ...items.map((item) => {
    const node = el("li");
    const parts = split(item);
    parts.forEach((part, i) => {
      const plain = i === 0 && ![ITEM, FENCE, QUOTE, HEADING].some((other) => other.test(part[0]));
      if (plain) inline(node, part.join("\n"), depth + 1);
      else node.append(build(part, depth + 1));
    });
    return node;
  }));
}

function table(lines, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => inline(el(tag), cell, depth)));
  return el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td"))));
}

// Code, links, bold, emphasis, struck-out text; the first that begins is taken. Bounded repetitions: no text takes long.
const INLINE = new RegExp([
  /(?<code>(?<!`)(?<ticks>`{1,3})(?!`)(?<inner>[^`]{1,2000}?)\k<ticks>(?!`))/,
  /!?\[(?<label>[^[\]]{0,500})\]\((?<href>[^\s()]{1,2000})\)/,
  /(?<url>https?:\/\/[^\s<>()"']{1,2000}[^\s<>()"'.,;:!?])/,
  /(?<mark>\*\*|~~|\*)(?=\S)(?<body>[^\n]{0,400}?\S)\k<mark>/,
  /(?<!\w)(?<line>__?)(?=\S)(?<lined>[^\n]{0,400}?\S)\k<line>(?!\w)/,
  /\\(?<escaped>[\\`*_{}[\]()#+.!|~>-])/,
].map((part) => part.source).join("|"));

function inline(node, text, depth) {
  let rest = text;
  for (let match; depth < MAX_DEPTH && (match = INLINE.exec(rest)); rest = rest.slice(match.index + match[0].length)) {
    const g = match.groups;
    node.append(rest.slice(0, match.index));
    if (g.code) node.append(el("code", {}, g.inner));
    else if (g.href !== undefined) node.append(link(g.href, g.label || g.href, match[0], depth));
    else if (g.url) node.append(link(g.url, g.url, g.url, MAX_DEPTH));
    else if (g.escaped) node.append(g.escaped);
    else {
      const tag = { "**": "strong", "__": "strong", "~~": "s" }[g.mark ?? g.line] ?? "em";
      node.append(inline(el(tag), g.body ?? g.lined, depth + 1));
    }
  }
  node.append(rest);
  return node;
}

function link(href, label, source, depth) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return source;
  return inline(el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }), label, depth + 1);
}
