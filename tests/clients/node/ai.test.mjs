// Vercel's AI SDK against the server at KTSERVE_URL, which serves the demo model.
import assert from 'node:assert/strict';
import test from 'node:test';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import * as ai from 'ai';
import { z } from 'zod';

const { generateText, streamText, Output, stepCountIs, tool } = ai;
const at = { baseURL: `${process.env.KTSERVE_URL}/v1`, apiKey: 'none' };
const openai = createOpenAI(at);
const compatible = createOpenAICompatible({ ...at, name: 'ktserve', includeUsage: true, supportsStructuredOutputs: true });
const models = { chat: openai.chat('demo'), responses: openai.responses('demo'), compatible: compatible('demo') };
const Person = z.object({ name: z.string(), age: z.number().int() });

for (const [name, model] of Object.entries(models)) {
  const asked = { model, temperature: 0, maxRetries: 0 };

  test(`${name}: text`, async () => {
    const answer = await generateText({ ...asked, prompt: 'What is 2 + 3?' });
    assert.equal(answer.text, '2 + 3 = 5.');
    assert.equal(answer.finishReason, 'stop');
    assert.ok(answer.usage.outputTokens > 3);
  });

  test(`${name}: stream`, async () => {
    const answer = streamText({ ...asked, prompt: 'What is 2 + 3?' });
    let text = '';
    for await (const piece of answer.textStream) text += piece;
    assert.equal(text, '2 + 3 = 5.');
    assert.ok((await answer.usage).outputTokens > 3);
  });

  for (const stream of [false, true]) {
    test(`${name}: tools${stream ? ', streamed' : ''}`, async () => {
      const cities = [];
      const execute = async ({ city }) => (cities.push(city), { sky: 'snowy', degrees: 3 });
      const get_weather = tool({ description: 'The weather of a city.', inputSchema: z.object({ city: z.string() }), execute });
      const settings = { ...asked, prompt: 'What is the weather in Paris?', tools: { get_weather }, stopWhen: stepCountIs(3) };
      const text = stream ? await streamText(settings).text : (await generateText(settings)).text;
      assert.equal(text, 'It is snowy in Paris, 3 degrees.');
      assert.deepEqual(cities, ['Paris']);
    });
  }

  test(`${name}: structured output`, async () => {
    const prompt = 'Tom is 7. Give me name and age as JSON.';
    const answer = await generateText({ ...asked, prompt, output: Output.object({ schema: Person }) });
    assert.deepEqual(answer.output, { name: 'Tom', age: 7 });
  });
}
