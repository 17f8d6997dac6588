// Code with its comments, strings, numbers and words of the language marked: spans around text, which stays as it is.
import { el } from "./dom.js";

const HASH = new Set(["bash", "makefile", "perl", "py", "python", "r", "rb", "ruby", "sh", "shell", "toml", "yaml", "yml", "zsh"]);
const DASHES = new Set(["haskell", "hs", "lua", "sql"]);
const PLAIN = new Set(["", "console", "diff", "markdown", "md", "output", "plaintext", "text", "txt"]);
const WORDS = new Set(`abstract and as assert async await bool boolean break case catch char class const continue def default del delete
  do double elif else enum except export extends false False final finally float fn for from func function global go if impl implements
  import in include int interface is lambda let long match mod module mut namespace new nil None nonlocal not null or package pass
  private protected pub public raise return select self short static struct super switch template this throw trait true True try type
  typedef typename use using var virtual void when where while with yield SELECT FROM WHERE INSERT INTO UPDATE DELETE CREATE TABLE JOIN
  LEFT RIGHT INNER GROUP ORDER BY HAVING LIMIT VALUES SET AS AND OR NOT NULL ON`.split(/\s+/));
const MOST = 20_000; // characters; what is longer stays plain, since it is looked through again with each token

// Each alternative begins with a character that only it begins with and runs to an end: linear in the text.
const STRINGS = String.raw`"""[^]*?(?:"""|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|\`(?:[^\`\\]|\\[^])*\`?`;
const REST = String.raw`(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_]\w*)`;
const COMMENT = { hash: "#[^\\n]*", dashes: "--[^\\n]*", slashes: String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)` };

// Text and spans that have together the text `code`.
export function highlight(code, language) {
  const name = language.toLowerCase().split(/\W/)[0];
  if (PLAIN.has(name) || code.length > MOST) return [code];
  const comment = COMMENT[HASH.has(name) ? "hash" : DASHES.has(name) ? "dashes" : "slashes"];
  const nodes = [];
  let at = 0;
  for (const found of code.matchAll(new RegExp(`(?<comment>${comment})|(?<string>${STRINGS})|${REST}`, "g"))) {
    const { comment: note, string, number, word } = found.groups;
    const kind = note ? "comment" : string ? "string" : number ? "number" : WORDS.has(word) ? "word" : "";
    if (!kind) continue;
    nodes.push(code.slice(at, found.index), el("span", { class: `code-${kind}` }, found[0]));
    at = found.index + found[0].length;
  }
  return [...nodes, code.slice(at)];
}
