// One call of the service by @grpc/grpc-js: node client.js PROTO_ROOT ADDRESS SCENARIO. Prints what came of it as JSON.
'use strict';
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const [root, address, scenario] = process.argv.slice(2);
const definition = protoLoader.loadSync('gemray/v1/generation.proto', {
  includeDirs: [root], keepCase: true, longs: String, enums: String, defaults: false, oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).gemray.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());
const endless = { text: 'Hi', sampling: { max_tokens: 200, ignore_eos: true } };

function show(result) {
  console.log(JSON.stringify(result));
  client.close();
}

function failure(error) {
  return { code: grpc.status[error.code], details: error.details, has_status: error.metadata.get('grpc-status-details-bin').length };
}

function unary(request, options = {}) {
  client.Generate(request, new grpc.Metadata(), options, (error, answer) => show(error ? failure(error) : answer));
}

const scenarios = {
  unary: () => unary({ text: 'Hi', request_id: 'r', sampling: { temperature: 0, seed: '18446744073709551615' } }),
  error: () => unary({ text: 'Hi', sampling: { top_p: 1.5 } }),
  deadline: () => unary(endless, { deadline: Date.now() + 2000 }),
  stream: () => {
    const messages = [];
    client.GenerateStream({ chat: { messages: [{ role: 'user', content: 'Hi' }] } })
      .on('data', (message) => messages.push(message))
      .on('error', (error) => show(failure(error)))
      .on('end', () => show(messages));
  },
  tools: () => {
    const tools_json = JSON.stringify([{ name: 'get_weather', parameters: { type: 'object' } }]);
    const messages = [{ role: 'user', content: 'Weather?' }];
    client.Generate({ chat: { messages, tools_json } }, (error, { tool_calls }) => {
      const told = { role: 'tool', tool_call_id: tool_calls[0].id, content: 'sun' };
      unary({ chat: { messages: [...messages, { role: 'assistant', tool_calls }, told], tools_json } });
    });
  },
  cancel: () => {
    const call = client.GenerateStream(endless);
    call.once('data', () => call.cancel());
    call.on('data', () => {}).on('error', (error) => show(failure(error)));
  },
};
scenarios[scenario]();
