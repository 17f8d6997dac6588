// Three prompts for an empty chat, by what the model was made for or can do.

const DEMO_FILE = "tiny-kite-q8_0.gguf"; // of the project's demo model, which knows one small world (docs/demo.md)
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city now.",
    parameters: { type: "object", properties: { city: { type: "string", description: "Name of the city" } }, required: ["city"] },
  },
};
const GENERAL = [
  { text: "Explain how a mixture of experts works, in five sentences." },
  { text: "Write a Python function that merges two sorted lists." },
  { text: "Give three titles for a story about a lighthouse." },
];
const REASONING = { text: "A bat and a ball cost 1.10 together. The bat costs 1.00 more than the ball. What does the ball cost?" };
const TOOL = { text: "What is the weather in Paris?", note: "with a tool", tools: [WEATHER] };
const MOST_BESIDE = 2; // adapters beside the base

// models: as /v1/models has them; capabilities: as /api/show has them. Each prompt has `text`; `tools` that go with it,
// `models` that are asked side by side, and a `note` that says so.
export function promptsFor(models, capabilities) {
  const base = models.find((model) => !model.parent);
  const adapters = models.filter((model) => model.parent).map((model) => model.id).slice(0, MOST_BESIDE);
  const beside = (text) => ({ text, note: `${base.id} beside ${adapters.join(" and ")}`, models: [base.id, ...adapters] });
  if (base?.root?.endsWith(DEMO_FILE)) {
    const colour = "What colour is a banana?";
    return [adapters.length ? beside(colour) : { text: colour }, TOOL, { text: "Tell me a story about a fox." }];
  }
  const own = [];
  if (capabilities.includes("thinking")) own.push(REASONING);
  if (capabilities.includes("tools")) own.push(TOOL);
  if (base && adapters.length) own.push(beside("Introduce yourself in one sentence."));
  return [...own, ...GENERAL].slice(0, 3);
}
