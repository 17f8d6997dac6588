// openai-node against the server at KTSERVE_URL, which serves the demo model.
import assert from 'node:assert/strict';
import test from 'node:test';
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const client = new OpenAI({ baseURL: `${process.env.KTSERVE_URL}/v1`, apiKey: 'none', maxRetries: 0 });
const SUM = [{ role: 'user', content: 'What is 2 + 3?' }];
const WEATHER = [{ role: 'user', content: 'What is the weather in Paris?' }];
const CITY = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const TOOL = { type: 'function', function: { name: 'get_weather', description: 'The weather of a city.', parameters: CITY } };
const GREEDY = { model: 'demo', temperature: 0 };
const Person = z.object({ name: z.string(), age: z.number().int() });

test('chat', async () => {
  const answer = await client.chat.completions.create({ ...GREEDY, messages: SUM });
  assert.equal(answer.choices[0].message.content, '2 + 3 = 5.');
  assert.equal(answer.choices[0].finish_reason, 'stop');
});

test('stream', async () => {
  const stream = client.chat.completions.stream({ ...GREEDY, messages: SUM, stream_options: { include_usage: true } });
  let text = '';
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? '';
  assert.equal(text, '2 + 3 = 5.');
  assert.ok((await stream.totalUsage()).completion_tokens > 3);
});

test('tools that run', async () => {
  const asked = [];
  const weather = async ({ city }) => (asked.push(city), JSON.stringify({ sky: 'snowy', degrees: 3 }));
  const tool = { type: 'function', function: { ...TOOL.function, function: weather, parse: JSON.parse } };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({ ...GREEDY, messages: WEATHER, tools: [tool], stream });
    assert.equal(await runner.finalContent(), 'It is snowy in Paris, 3 degrees.');
  }
  assert.deepEqual(asked, ['Paris', 'Paris']);
});

test('parse', async () => {
  const messages = [{ role: 'user', content: 'Tom is 7. Give me name and age as JSON.' }];
  const response_format = zodResponseFormat(Person, 'person');
  const answer = await client.chat.completions.parse({ ...GREEDY, messages, response_format });
  assert.deepEqual(answer.choices[0].message.parsed, { name: 'Tom', age: 7 });
});

test('responses', async () => {
  const whole = await client.responses.create({ ...GREEDY, input: 'What is 2 + 3?' });
  assert.equal(whole.output_text, '2 + 3 = 5.');
  const stream = client.responses.stream({ ...GREEDY, input: 'What is 2 + 3?' });
  let text = '';
  for await (const event of stream) if (event.type === 'response.output_text.delta') text += event.delta;
  assert.equal(text, '2 + 3 = 5.');
  assert.equal((await stream.finalResponse()).status, 'completed');
  const input = 'Tom is 7. Give me name and age as JSON.';
  const filled = await client.responses.parse({ ...GREEDY, input, text: { format: zodTextFormat(Person, 'person') } });
  assert.deepEqual(filled.output_parsed, { name: 'Tom', age: 7 });
});

test('models, text completions, errors', async () => {
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  assert.ok(models.includes('demo') && models.includes('pirate'));
  const text = await client.completions.create({ ...GREEDY, prompt: 'Once', max_tokens: 5 });
  assert.equal(text.usage.completion_tokens, 5);
  await assert.rejects(client.chat.completions.create({ model: 'nobody', messages: SUM }), OpenAI.NotFoundError);
  await assert.rejects(
    client.chat.completions.create({ ...GREEDY, messages: [{ role: 'user', content: 'word '.repeat(5000) }] }),
    (error) => error instanceof OpenAI.BadRequestError && error.code === 'context_length_exceeded',
  );
});

test('an aborted stream ends', async () => {
  const stream = await client.chat.completions.create({ ...GREEDY, messages: SUM, stream: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});
