// Requests to the server that this page came from, and its errors in plain words. Paths are relative to the page: a
// proxy may publish it under a prefix.

export const keys = { api: "", admin: "" };

export class ServerError extends Error {
  constructor(message, detail = "", code = null) {
    super(message);
    this.detail = detail;
    this.code = code; // the server's name for it, if it has one
  }
}

export async function call(path, { body, signal, admin = false, method = body === undefined ? "GET" : "POST" } = {}) {
  const key = admin ? keys.admin || keys.api : keys.api;
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: {
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...(key ? { Authorization: `Bearer ${key}` } : {}),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let detail = "";
  let code = null;
  try {
    ({ message: detail, code } = (await response.json()).error);
  } catch {
    detail = `HTTP ${response.status}`; // not our server's form: a proxy's, perhaps
  }
  const wait = response.headers.get("Retry-After");
  const later = wait ? ` Try again in ${wait} s.` : " Try again in a moment.";
  return new ServerError(inWords(response.status, later), detail, code);
}

function inWords(status, later) {
  switch (status) {
    case 400: return "The server does not accept this request.";
    case 401: return "This needs a key. Enter it under Settings.";
    case 403: return "This key may not do that.";
    case 404: return "The server does not have this model or address.";
    case 408: return "The request took too long to arrive.";
    case 413: return "The conversation is too large for this server.";
    case 429: return `The server is busy.${later}`;
    case 503: return `The server is not ready.${later}`;
    default: return status >= 500 ? "The server failed at this request." : "The server refused this request.";
  }
}

// The data of server-sent events, parsed, until [DONE]. Raises ServerError for an error among them.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("The answer broke off: the connection to the server was lost.");
      pending += value;
      const lines = pending.split("\n");
      pending = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ServerError("The server could not finish this answer.", parsed.error.message);
        yield parsed;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ServerError("The answer broke off: the connection to the server was lost.");
    throw error;
  } finally {
    reader.cancel().catch(() => {}); // it may have ended already
  }
}

export function curlOf(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl ${quoted(new URL(path, document.baseURI).href)}`, `-H ${quoted("Content-Type: application/json")}`];
  if (keys.api) lines.push('-H "Authorization: Bearer $KTSERVE_API_KEY"');
  lines.push(body.stream ? "--no-buffer" : "", `-d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.filter(Boolean).join(" \\\n  ");
}
