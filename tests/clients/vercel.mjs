// One cell of the table with Vercel's AI SDK; prints what is answered as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const { picture, prompt, limit, cell, model, ...place } = JSON.parse(process.argv[2]);
const provider = createOpenAICompatible({ name: "valora", supportsStructuredOutputs: true, ...place });
const common = { model: provider(model), maxOutputTokens: limit, maxRetries: 0 };
const schema = z.object({ colour: z.enum(["red", "green", "blue"]), most: z.literal([1, 2, 3]) });
const find = tool({ description: "Find the things of a colour.", inputSchema: schema });
const parts = [{ type: "text", text: prompt }, { type: "image", image: picture }];
const ask = (content, more) =>
  generateText({ ...common, messages: [{ role: "user", content }], ...more });
const call = async (toolChoice) => {
  const { toolCalls, text } = await ask(prompt, { tools: { find }, toolChoice });
  return toolCalls.length ? Object.fromEntries(toolCalls.map((c) => [c.toolName, c.input])) : text;
};
const cells = {
  chat: async () => (await ask(prompt)).text,
  stream: async (pieces = []) => {
    for await (const piece of streamText({ ...common, prompt }).textStream) pieces.push(piece);
    return pieces;
  },
  image: async () => (await ask(parts)).text,
  auto: () => call("auto"),
  required: () => call("required"),
  schema: async () => (await ask(prompt, { output: Output.object({ schema }) })).output,
  embeddings: async () =>
    (await embed({ model: provider.embeddingModel(model), value: prompt })).embedding,
};
console.log(JSON.stringify(await cells[cell]()));
